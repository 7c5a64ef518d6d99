"""Verifiers: which answers are right."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import request, run
from sample_records import sample

from instep.generation import sandbox
from instep.generation.sandbox import SandboxLimits
from instep.generation.verifiers import Answer, CodeTests, ExactMatch, Format, Numeric, code_block, final, last_number


def answer(text: str) -> Answer:
    return Answer(text, sample([]), request())


def score(verifier: Any, text: str, value: Any) -> float:
    return run(verifier(answer(text), value))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_is_thoughts_then_an_answer_and_nothing_else(text: str, fits: float) -> None:
    assert score(Format(), text, None) == fits


@pytest.mark.parametrize(
    ("text", "value", "right"),
    [
        ("The  Moon.", "moon", 1.0), ("a cat", ["dog", "the cat"], 1.0), ("catalogue", "cat", 0.0), ("", "moon", 0.0),
        ("it is \\boxed{Paris}", "paris", 1.0), ("<answer>Paris</answer>", "paris", 1.0), ("Paris, I say", "paris", 0.0),
    ],
)  # fmt: skip
def test_an_exact_match_ignores_case_articles_punctuation_and_space(text: str, value: Any, right: float) -> None:
    assert score(ExactMatch(), text, value) == right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no", "no"), ("x \\boxed{1} y \\boxed{\\frac{1}{2}} z", "\\frac{1}{2}"), ("\\boxed{a", "a"),
        ("<answer>1</answer> <answer>2</answer>", "2"), ("<answer>\\boxed{3}</answer>", "3"), ("<answer> 4", "4"),
    ],
)  # fmt: skip
def test_the_final_answer_is_the_last_one(text: str, answer: str) -> None:
    assert final(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.5 apples", "1234.5"), ("-3/4", "-3/4"), ("6e-3", "3/500"), ("10-3", "3"), ("from 7 to -8", "-8"), (".5", "1/2"),
        ("3.", "3"), ("so it is 42.", "42"), ("12,34", "34"), ("1/0", "0"), ("1.5/2", "3/4"), ("v2", "2"), ("(2)-1", "1"), ("= -1", "-1"),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert last_number(text) == Fraction(number)


@given(st.text(alphabet="0123456789.,-/eE ()x", max_size=60))
def test_no_text_breaks_the_search_for_a_number(text: str) -> None:
    last_number(text)


@pytest.mark.parametrize("text", ["none", "9" * 5000, "1e9999999", ""])
def test_what_is_no_number_or_none_to_compute_with_is_no_answer(text: str) -> None:
    assert score(Numeric(), text, "5") == 0.0


def test_numbers_are_equal_exactly_or_within_the_tolerance() -> None:
    assert score(Numeric(), "#### 1,000", "1000.0") == 1.0
    assert score(Numeric(), "0.1", 0.1) == 1.0
    assert score(Numeric(), "3.14", "3.14159") == 0.0
    assert score(Numeric(0.01), "3.14", "3.14159") == 1.0
    assert score(Numeric(0.01), "-3.14", "3.14159") == 0.0


def test_a_label_without_a_number_breaks_the_verifier() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        score(Numeric(), "1", "one")


CODE = "I think:\n```python\ndef wrong(): ...\n```\nNo:\n```py\ndef double(x):\n    return 2 * x\n```\nDone."
TESTS = CodeTests(SandboxLimits(seconds=5.0))


def test_the_last_fenced_block_is_the_program_or_else_the_whole_text() -> None:
    assert code_block(CODE) == "def double(x):\n    return 2 * x\n"
    assert code_block("print(1)") == "print(1)"


def test_code_that_passes_all_tests_is_right() -> None:
    assert score(TESTS, CODE, ["assert double(2) == 4", "x = double(3)", "assert x == 6"]) == 1.0


def test_code_that_passes_some_tests_is_wrong_unless_a_part_is_enough() -> None:
    tests = ["assert double(2) == 4", "assert double(2) == 5", "assert double(3) == 6", "raise SystemExit"]
    assert score(TESTS, CODE, tests) == 0.0
    assert score(CodeTests(threshold=0.5), CODE, tests) == 0.5


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import os; os._exit(0)", "while True: pass", "def double(x"])
def test_code_that_ends_or_breaks_before_its_tests_passes_none(code: str) -> None:
    assert score(CodeTests(SandboxLimits(seconds=0.3)), f"```python\n{code}\n```", ["assert double(1) == 2"]) == 0.0


def test_a_test_that_hangs_costs_no_test_that_passed_before_it() -> None:
    code = "```python\ndef f(x):\n    while x: pass\n```"
    assert score(CodeTests(SandboxLimits(seconds=0.5), threshold=0.5), code, ["f(0)", "f(1)"]) == 0.5


def test_a_program_is_compared_by_what_it_prints_for_its_input() -> None:
    code = "```python\nprint(int(input()) + 1)\n```"
    assert score(TESTS, code, [{"input": "1\n", "output": "2"}]) == 1.0
    assert score(TESTS, code, [{"input": "1\n", "output": "3"}]) == 0.0


def test_tests_that_are_none_and_a_sandbox_that_fails_break_the_verifier(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="no tests"):
        score(TESTS, CODE, [])
    monkeypatch.setattr(sandbox, "KEEPER", tmp_path / "absent.py")
    with pytest.raises(RuntimeError, match="could not run"):
        score(TESTS, CODE, ["assert True"])
