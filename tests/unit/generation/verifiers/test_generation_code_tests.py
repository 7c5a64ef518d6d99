"""The verifier of programs: which answers pass their tests."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.code_answers import RIGHT, WRONG
from helpers.rollouts import TOKENIZER, encode, request, run
from helpers.sample_records import sample

from instep.errors import ConfigError
from instep.generation import GenerationResult, Label, RewardConfig
from instep.generation.sandbox import Run, SandboxLimits, kept, run_python
from instep.generation.verifiers import Answer, CodeTests, code, code_block


def score(verifier: CodeTests, text: str, value: Any) -> float:
    return run(verifier(Answer(text, sample([]), request()), value))


FAST = CodeTests(SandboxLimits(seconds=20.0, output=1 << 20))


@pytest.mark.parametrize(("answer", "tests", "right"), [row[1:] for row in RIGHT], ids=[row[0] for row in RIGHT])
def test_a_right_answer_gets_its_point(answer: str, tests: list[Any], right: float) -> None:
    assert score(FAST, answer, tests) == right


@pytest.mark.parametrize(("answer", "tests", "wrong"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_or_hostile_answer_gets_none(answer: str, tests: list[Any], wrong: float) -> None:
    assert score(CodeTests(SandboxLimits(seconds=4.0, output=1 << 20)), answer, tests) == wrong


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
    assert score(CodeTests(SandboxLimits(seconds=2.0), threshold=0.5), code, ["f(0)", "f(1)"]) == 0.5


def test_a_program_is_compared_by_what_it_prints_for_its_input() -> None:
    code = "```python\nprint(int(input()) + 1)\n```"
    assert score(TESTS, code, [{"input": "1\n", "output": "2"}]) == 1.0
    assert score(TESTS, code, [{"input": "1\n", "output": "3"}]) == 0.0


@pytest.mark.parametrize("threshold", [0.1, 1.0])
def test_a_program_that_loops_scores_0_once_the_time_of_all_its_tests_is_over(threshold: float) -> None:
    verifier = CodeTests(SandboxLimits(seconds=0.3), threshold=threshold, seconds=0.5)
    assert score(verifier, "```python\nwhile True: pass\n```", [{"input": "", "output": "2"}] * 50) == 0.0


def test_looping_programs_take_no_time_of_those_that_wait_for_a_place() -> None:
    verifier = CodeTests(SandboxLimits(seconds=5.0), at_once=1, seconds=1.0)
    texts = ["```python\nwhile True: pass\n```"] * 3 + ["```python\nprint(2)\n```"]
    label = Label("code", [{"input": "", "output": "2"}])
    result = GenerationResult(request=request(labels=(label,), n=4), samples=[sample(encode(text)) for text in texts])
    scored = run(RewardConfig(verifiers={"code": verifier}, seconds=2.0).build(TOKENIZER)(result)).samples
    assert [(one.reward.score, one.reward.error) for one in scored if one.reward] == [(0.0, None)] * 3 + [(10.0, None)]


def test_no_test_is_run_that_can_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    async def counted(program: str, *given: Any, **named: Any) -> Run:
        ran.append(program)
        return await run_python(program, *given, **named)

    monkeypatch.setattr(code, "run_python", counted)
    assert score(FAST, "```python\nprint(3)\n```", [{"input": "", "output": "2"}] * 9) == 0.0
    assert len(ran) == 1
    assert score(CodeTests(threshold=0.5), "```python\nprint(3)\n```", [{"input": "", "output": "2"}] * 4) == 0.0
    assert len(ran) == 4


def test_a_program_that_is_lost_again_and_again_is_wrong_where_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def loses(program: str, *given: Any, **named: Any) -> Run:
        lost = Run(output="killed", end="lost", code=-1, seconds=0.0)
        return lost if "print" in program or always else await run_python(program, *given, **named)

    always = False
    monkeypatch.setattr(code, "run_python", loses)
    assert score(FAST, "```python\nprint(2)\n```", [{"input": "", "output": "2"}]) == 0.0
    always = True
    with pytest.raises(RuntimeError, match="could not run the program: killed"):
        score(FAST, "```python\nprint(2)\n```", [{"input": "", "output": "2"}])


@pytest.mark.parametrize("label", [[], "assert f()", [1], [{"input": "1"}], [{"input": 1, "output": "2"}], None])
def test_a_label_that_is_no_list_of_tests_breaks_the_verifier(label: Any) -> None:
    with pytest.raises(ValueError, match="the label holds"):
        score(FAST, CODE, label)


def test_a_sandbox_that_fails_breaks_the_verifier(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(kept, "KEEPER", tmp_path / "absent.py")
    monkeypatch.setattr(kept, "_kept", None)
    with pytest.raises(ConfigError, match="no program can be run here"):
        score(TESTS, CODE, ["assert True"])
