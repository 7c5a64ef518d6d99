"""How the processes that compare mathematical answers are kept; `tests/contract/test_math_verify.py` has real ones."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest
from helpers.rollouts import TOKENIZER, encode, request, run
from helpers.sample_records import sample

from instep.errors import ConfigError
from instep.generation import GenerationResult, Label, RewardConfig, maths
from instep.generation.verifiers import Answer
from instep.generation.verifiers.maths import Maths, Worker

SLOW = """
import json, sys, time
from multiprocessing.connection import Connection
asker = Connection(int(sys.argv[2]))
while True:
    try:
        question = json.loads(asker.recv_bytes())
    except EOFError:
        break
    if question.get("answer") == "hang": time.sleep(3600)
    if question.get("answer") == "die": raise MemoryError
    asker.send_bytes(json.dumps({"score": 1.0}).encode())
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
    assert [run(slow(Answer(text, sample([]), request()), "1")) for text in ("fine", answer, "fine")] == [1.0, 0.0, 1.0]


def test_many_answers_wait_for_one_process_without_running_out_of_time(slow: Maths) -> None:
    async def main() -> list[float]:
        return await asyncio.gather(*(slow(Answer("fine", sample([]), request()), "1") for _ in range(50)))

    assert run(main()) == [1.0] * 50


def test_answers_that_hang_take_no_time_from_those_that_wait_behind_them(slow: Maths) -> None:
    texts = ["hang"] * 8 + ["fine"] * 2
    result = GenerationResult(request=request(labels=(Label("maths", "1"),), n=10), samples=[sample(encode(text)) for text in texts])
    scored = run(RewardConfig(verifiers={"maths": slow}, seconds=2.0).build(TOKENIZER)(result)).samples
    assert [(one.reward.score, one.reward.error) for one in scored if one.reward] == [(0.0, None)] * 8 + [(10.0, None)] * 2


def test_a_verifier_is_sent_to_another_process_without_its_own(slow: Maths) -> None:
    sent = pickle.loads(pickle.dumps(slow))
    assert (sent.own_seconds, sent.memory, sent.processes) == (0.3, 1 << 31, 1)


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


def test_a_process_ends_by_itself_when_nobody_can_ask_it_any_more(slow: Maths) -> None:
    worker = Worker(1 << 31)
    worker.connection.close()  # as the kernel does for a process that was killed
    assert worker.process.wait(10) == 0


def test_without_math_verify_the_verifier_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="math_verify") as error:
        Maths()
    assert 'pip install "instep[generation]"' in str(error.value)
