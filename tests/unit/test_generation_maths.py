"""Mathematical answers, with the real math-verify."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rollouts import TOKENIZER, encode, request, run, until
from sample_records import sample

from instep.errors import ConfigError
from instep.generation import GenerationResult, Label, RewardConfig, maths
from instep.generation.maths import Maths, Worker
from instep.generation.verifiers import Answer

needed = pytest.mark.skipif(maths.find_spec("math_verify") is None, reason="math-verify is not installed: pip install 'instep[generation]'")


@pytest.fixture(scope="module")
def verifier() -> Maths:
    return Maths(processes=1)


def score(verifier: Maths, text: str, value: Any) -> float:
    return run(asyncio.wait_for(verifier(Answer(text, sample([]), request()), value), 60.0))


@needed
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


@needed
def test_a_label_that_is_no_mathematics_breaks_the_verifier(verifier: Maths) -> None:
    with pytest.raises(ValueError, match="is no mathematics"):
        score(verifier, "\\boxed{1}", "")


SLOW = """
import json, sys, time
for line in sys.stdin:
    question = json.loads(line)
    if question.get("answer") == "hang": time.sleep(3600)
    if question.get("answer") == "die": raise MemoryError
    print(json.dumps({"score": 1.0}), flush=True)
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maths:
    """A verifier whose process does what it is told to."""
    script = tmp_path / "worker.py"
    script.write_text(SLOW)
    monkeypatch.setattr(maths, "WORKER", script)
    monkeypatch.setattr(maths, "find_spec", lambda name: True)
    return Maths(seconds=0.3, processes=1)


@pytest.mark.parametrize("answer", ["hang", "die"])
def test_an_answer_that_takes_all_time_or_memory_is_wrong_and_the_next_one_is_judged(slow: Maths, answer: str) -> None:
    assert [score(slow, text, "1") for text in ("fine", answer, "fine")] == [1.0, 0.0, 1.0]


def test_many_answers_wait_for_one_process_without_running_out_of_time(slow: Maths) -> None:
    async def main() -> list[float]:
        return await asyncio.gather(*(slow(Answer("fine", sample([]), request()), "1") for _ in range(50)))

    assert run(main()) == [1.0] * 50


def test_a_process_that_does_not_start_breaks_the_verifier_and_says_so_in_the_reward(slow: Maths, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("raise SystemExit")
    result = GenerationResult(request=request(labels=(Label("maths", "1"),)), samples=[sample(encode("1"))])
    (scored,) = run(RewardConfig(verifiers={"maths": slow}).build(TOKENIZER)(result)).samples
    assert scored.reward
    assert "did not start" in str(scored.reward.error)


def test_a_process_ends_with_its_worker(slow: Maths) -> None:
    worker = Worker(1 << 31)
    process = worker.process
    del worker
    assert process.poll() == -9


def test_no_process_outlives_the_one_that_asked(slow: Maths, tmp_path: Path) -> None:
    text = (
        "from instep.generation import maths\nfrom pathlib import Path\n"
        f"maths.WORKER = Path({str(tmp_path / 'worker.py')!r})\nworker = maths.Worker(1 << 31)\n"
        "print(worker.process.pid, flush=True)\nimport os\nos.kill(os.getpid(), 9)"
    )
    asked = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    run(until(lambda: not Path("/proc", asked.stdout.strip()).exists()))


def test_without_math_verify_the_verifier_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="math-verify") as error:
        Maths()
    assert 'pip install "instep[generation]"' in str(error.value)
