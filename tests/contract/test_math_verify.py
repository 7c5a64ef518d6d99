"""What counts as the same mathematics, with the real math-verify."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.rollouts import request
from helpers.sample_records import sample

from instep.generation.verifiers import Answer
from instep.generation.verifiers.maths import Maths

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'instep[generation]'")


@pytest.fixture(scope="module")
def verifier() -> Maths:
    return Maths(processes=1)


def score(verifier: Maths, text: str, value: Any) -> float:
    return asyncio.run(asyncio.wait_for(verifier(Answer(text, sample([]), request()), value), 60.0))


@pytest.mark.parametrize(
    ("text", "value", "right"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("The answer is $x^2 + 2x + 1$", "(x+1)^2", 1.0),
        ("\\boxed{x=3}", "3", 1.0),
        ("$\\{1, 2\\}$", "\\{2, 1\\}", 1.0),
        ("\\boxed{42}", 42, 1.0),
        ("\\boxed{41}", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        ("\\boxed{\\frac{1}{", "42", 0.0),
    ],
)
def test_answers_are_equal_as_mathematics(verifier: Maths, text: str, value: Any, right: float) -> None:
    assert score(verifier, text, value) == right


def test_a_label_that_is_no_mathematics_breaks_the_verifier(verifier: Maths) -> None:
    with pytest.raises(ValueError, match="is no mathematics"):
        score(verifier, "\\boxed{1}", "")
