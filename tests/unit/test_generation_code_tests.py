"""The verifier of programs: which answers pass their tests."""

from __future__ import annotations

from typing import Any

import pytest
from rollouts import request, run
from sample_records import sample

from instep.errors import ConfigError
from instep.generation.sandbox import SandboxLimits, kept
from instep.generation.verifiers import Answer, CodeTests, code_block


def score(verifier: CodeTests, text: str, value: Any) -> float:
    return run(verifier(Answer(text, sample([]), request()), value))


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
    monkeypatch.setattr(kept, "KEEPER", tmp_path / "absent.py")
    monkeypatch.setattr(kept, "_kept", None)
    with pytest.raises(ConfigError, match="no program can be run here"):
        score(TESTS, CODE, ["assert True"])
