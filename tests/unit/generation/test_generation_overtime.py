"""Code that takes for ever is stopped, beside an event loop that goes on."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from helpers.rollouts import TOKENIZER, Say, ScriptedClient, harness, request, run, said

from instep.generation import overtime
from instep.generation.overtime import in_time
from instep.generation.rollout import turns as rollout_module
from instep.generation.rollout.turns import rollout
from instep.generation.tools.parsers import TaggedParser


def for_ever() -> None:
    for _ in itertools.count():
        try:
            sum(range(10))
        except Exception:
            continue


def test_what_is_in_time_is_returned_or_raised() -> None:
    assert run(in_time(lambda: 3, 5.0)) == 3
    with pytest.raises(KeyError):
        run(in_time(lambda: dict[str, int]()["x"], 5.0))
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        run(in_time(lambda: exec("raise SystemExit(3)"), 5.0))


def test_what_is_not_is_stopped_and_its_thread_ends() -> None:
    with pytest.raises(TimeoutError):
        run(in_time(for_ever, 0.05))
    for thread in threading.enumerate():
        if thread.name == "instep-in-time":
            thread.join(10.0)
            assert not thread.is_alive()


def test_a_call_into_c_that_lets_others_work_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overtime, "ENDING", 0.05)
    lock = threading.Lock()
    lock.acquire()
    with pytest.raises(TimeoutError):
        run(in_time(lock.acquire, 0.05))
    lock.release()
    for thread in threading.enumerate():
        if thread.name == "instep-in-time":
            thread.join(10.0)
            assert not thread.is_alive()


def test_a_parser_that_takes_for_ever_over_a_long_turn_has_found_a_call_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(TaggedParser):
        def parse(self, text: str, tools: Any) -> Any:
            return for_ever() if len(text) > 100 else super().parse(text, tools)

    monkeypatch.setattr(rollout_module, "READING", 0.05)
    client = ScriptedClient(said("x" * 2000), said("ok"))
    sample = run(rollout(request(max_tokens=3900), 0, client, harness(Say(), parser=Slow(TOKENIZER))))
    assert [(record.outcome, record.error) for record in sample.tools] == [("malformed", "the tool call could not be read in 0.05 seconds")]
    assert (sample.finish_reason, sample.turns) == ("stop", 2)
