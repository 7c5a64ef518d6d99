"""An actor that is sent tensors one at a time, with Open Instruct's names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import SOON, FakeServing, Fleet, wait, weights

from instep import WeightSync
from instep.errors import EngineTimeout, PlanError


@pytest.fixture
def fleet(segments: Path) -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.stop()


class Extension:
    """A worker's extension that commits nothing, and says what the engine did meanwhile."""

    def __init__(self, serving: FakeServing, state: str = "serving", error: Exception | None = None) -> None:
        self.serving, self.state, self.error = serving, state, error
        self.calls: list[tuple[str, bool, int]] = []
        serving.extension = self

    def __call__(self, method: str, *arguments: Any) -> dict[str, Any]:
        self.calls.append((method, self.serving.weights.paused, len(self.serving.running)))
        if arguments[-1] is True:
            receiver = self.serving.weights.receivers[0]
            receiver.version, receiver.state = f"round-{len(self.calls)}", self.state  # type: ignore[assignment]
            if self.error:
                raise self.error
        return {"ok": True}


def spans(result: Any) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in result.samples[0].versions]


def test_the_last_tensor_is_committed_between_two_steps_and_labels_the_tokens_after_it(fleet: Fleet) -> None:
    serving = FakeServing("abcdef", hold=3)
    extension, actor = Extension(serving), fleet.actor(serving)
    future = actor.submit(fleet.ask("a"))
    wait(lambda: serving.running)
    assert actor.init_process_group("host", 1, 1, 2, "g", "gloo") == [{"ok": True}]
    actor.update_weight("x", "bfloat16", [1])
    actor.update_weight_cuda_ipc("y", "bfloat16", [1], {}, empty_cache=True)
    assert [call[:2] for call in extension.calls] == [
        ("init_process_group", False), ("update_weight", False), ("update_weight_cuda_ipc", True),
    ]  # fmt: skip
    serving.release()
    assert spans(future.result(SOON)) == [("default", 0, 3), ("round-3", 3, 6)]
    assert actor.status().version == "round-3"


def test_without_updates_in_flight_the_last_tensor_waits_for_turns(fleet: Fleet) -> None:
    serving = FakeServing("abcdef", hold=3)
    extension, actor = Extension(serving), fleet.actor(serving, inflight_updates=False)
    future = actor.submit(fleet.ask("a"))
    wait(lambda: serving.running)
    with ThreadPoolExecutor(1) as thread:
        last = thread.submit(actor.update_weight, "x", "bfloat16", [1], True)
        wait(lambda: actor.status().closed == ["update"])
        assert not extension.calls
        serving.release()
        last.result(SOON)
    assert extension.calls == [("update_weight", True, 0)]
    assert spans(future.result(SOON)) == [("default", 0, 6)]
    assert spans(actor.submit(fleet.ask("b")).result(SOON)) == [("round-1", 0, 6)]


def test_turns_that_do_not_end_leave_the_engine_with_what_it_has(fleet: Fleet) -> None:
    serving = FakeServing("abcdef", hold=3)
    actor = fleet.actor(serving, inflight_updates=False, drain_timeout=0.05)
    extension = Extension(serving)
    future = actor.submit(fleet.ask("a"))
    wait(lambda: serving.running)
    with pytest.raises(EngineTimeout, match="did not end 1 turns"):
        actor.update_weight("x", "bfloat16", [1], True)
    assert not extension.calls
    serving.release()
    assert spans(future.result(SOON)) == [("default", 0, 6)]


def test_a_commit_that_was_refused_leaves_the_engine_at_work(fleet: Fleet) -> None:
    serving = FakeServing("abc")
    actor = fleet.actor(serving)
    serving.extension = lambda *_: (_ for _ in ()).throw(PlanError("incomplete"))
    with pytest.raises(PlanError, match="incomplete"):
        actor.update_weight("x", "bfloat16", [1], True)
    assert spans(actor.submit(fleet.ask("a")).result(SOON)) == [("default", 0, 3)]


def test_an_engine_that_is_dirty_afterwards_holds_prompts_until_it_is_healed(fleet: Fleet) -> None:
    serving = FakeServing("abc")
    actor = fleet.actor(serving)
    Extension(serving, state="dirty", error=PlanError("in the middle"))
    with pytest.raises(PlanError, match="in the middle"):
        actor.update_weight("x", "bfloat16", [1], True)
    assert actor.status().closed == ["dirty"]
    future = actor.submit(fleet.ask("a"))
    Extension(serving)
    actor.update_weight("x", "bfloat16", [1], True)
    assert spans(future.result(SOON)) == [("round-1", 0, 3)]
    Extension(serving, state="dirty")
    actor.update_weight("x", "bfloat16", [1], True)
    with WeightSync(weights(2), [actor]) as sync:
        sync.push("v1")
    assert spans(actor.submit(fleet.ask("b")).result(SOON)) == [("v1", 0, 3)]


class Endless(Extension):
    """Sees the end of an update by itself, with its third tensor."""

    def __call__(self, method: str, *arguments: Any) -> dict[str, Any]:
        assert len(arguments) == 3, "empty_cache was not given, and must not be made up"
        super().__call__(method, *arguments)
        ended = len(self.calls) % 3 == 0
        if ended:
            self.serving.weights.receivers[0].version = f"round-{len(self.calls)}"
        return {"ok": True, "committed": ended}


def test_an_end_that_the_workers_see_is_labelled_and_from_the_second_update_on_between_two_steps(fleet: Fleet) -> None:
    serving = FakeServing("abc")
    extension, actor = Endless(serving), fleet.actor(serving)
    for update in (1, 2):
        for name in ("x", "y", "z"):
            actor.update_weight(name, "bfloat16", [1])
        assert actor.status().version == f"round-{3 * update}"
        assert spans(actor.submit(fleet.ask(str(update))).result(SOON)) == [(f"round-{3 * update}", 0, 3)]
    assert [paused for _, paused, _ in extension.calls] == [False] * 5 + [True]


def test_without_updates_in_flight_no_tensor_comes_while_a_turn_runs(fleet: Fleet) -> None:
    serving = FakeServing("abcdef", hold=3)
    extension, actor = Endless(serving), fleet.actor(serving, inflight_updates=False)
    future = actor.submit(fleet.ask("a"))
    wait(lambda: serving.running)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(actor.update_weight, "x", "bfloat16", [1])
        wait(lambda: actor.status().closed == ["update"])
        assert not extension.calls
        serving.release()
        first.result(SOON)
    assert extension.calls == [("update_weight", True, 0)]
    assert spans(future.result(SOON)) == [("default", 0, 6)]


def test_an_end_that_is_said_with_a_label_is_committed_between_two_steps(fleet: Fleet) -> None:
    serving = FakeServing("abc")
    extension, actor = Extension(serving), fleet.actor(serving)
    actor.update_weight("x", "bfloat16", [1], False)
    actor.finish_update("mine")
    assert [call[:2] for call in extension.calls] == [("update_weight", False), ("finish_update", True)]
    assert not serving.weights.paused
