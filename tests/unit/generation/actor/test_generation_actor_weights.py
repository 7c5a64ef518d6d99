"""An actor as an engine of a `WeightSync`: pushes while it generates, drained pushes, engines that refuse, results that are too old."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.rollouts import Say
from helpers.serving import SOON, FakeServing, Fleet, wait, weights

from instep import WeightSync
from instep.engine import CachePolicy
from instep.engine.fused_commit import step_by_step
from instep.engine.memory import MemoryEngine
from instep.errors import ApplyError, GenerationError, SyncError
from instep.generation import TaggedParser
from instep.generation.actor.work import ATTEMPTS


@pytest.fixture
def fleet(segments: Path) -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.stop()


def spans(result: Any) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in result.samples[0].versions]


def test_a_push_in_flight_labels_the_tokens_before_and_after_it(fleet: Fleet) -> None:
    serving = FakeServing("abcdef", hold=3)
    actor = fleet.actor(serving)
    with WeightSync(weights(2), [actor]) as sync:
        sync.push("v1")
        futures = [actor.submit(fleet.ask(str(index))) for index in range(3)]
        wait(lambda: len(serving.running) == 3)
        time.sleep(0.02)
        sync.push("v2")
        serving.release()
        assert [spans(future.result(SOON)) for future in futures] == [[("v1", 0, 3), ("v2", 3, 6)]] * 3
        assert spans(actor.submit(fleet.ask("new")).result(SOON)) == [("v2", 0, 6)]
        assert [asked[3] for asked in serving.asked] == ["v1"] * 3 + ["v2"]
        assert sync.status()[0].version == actor.status().version == "v2"


class Fused(MemoryEngine):
    """Commits in one call, and goes on before it says so."""

    def __init__(self) -> None:
        super().__init__(weights())
        self.at_work, self.go = threading.Event(), threading.Event()
        self.go.set()

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes]:
        answers = await step_by_step(self, payload, caches, version)
        self.at_work.set()
        await asyncio.to_thread(self.go.wait)
        return answers


@pytest.mark.parametrize("inflight_updates", [True, False])
def test_an_engine_commits_in_one_call_and_no_turn_begins_with_the_old_label(fleet: Fleet, inflight_updates: bool) -> None:
    serving = FakeServing("abc")
    serving.weights = engine = Fused()
    actor = fleet.actor(serving, inflight_updates=inflight_updates)
    with WeightSync(weights(2), [actor]) as sync:
        sync.push("v1")
        assert engine.at_work.is_set() == inflight_updates  # a drain comes before a pause
        engine.at_work.clear()
        engine.go.clear()
        pushing = threading.Thread(target=sync.push, args=("v2",))
        pushing.start()
        if inflight_updates:
            assert engine.at_work.wait(SOON)
            future = actor.submit(fleet.ask("meanwhile"))
            wait(lambda: actor.status().prompts == 1)
            assert actor.status().closed == ["commit"]
            assert serving.asked == []
            engine.go.set()
            assert future.result(SOON)
            assert [asked[3] for asked in serving.asked] == ["v2"]
        pushing.join(SOON)
        assert (pushing.is_alive(), actor.status().version, actor.status().closed) == (False, "v2", [])


def test_a_drained_push_waits_for_turns_and_holds_back_the_next(fleet: Fleet) -> None:
    serving = FakeServing("abcdef", hold=3)
    actor = fleet.actor(serving, inflight_updates=False)
    with WeightSync(weights(2), [actor]) as sync:
        sync.push("v1")
        first = actor.submit(fleet.ask("first"))
        wait(lambda: serving.running)
        pushing = threading.Thread(target=sync.push, args=("v2",))
        pushing.start()
        wait(lambda: actor.status().closed == ["update"])
        held = actor.submit(fleet.ask("held"))
        cancelled = fleet.ask("cancelled")
        dropped = actor.submit(cancelled)
        wait(lambda: actor.status().prompts == 3)
        assert actor.cancel(cancelled.id)
        assert dropped.result(SOON).samples[0].finish_reason == "abort"  # at once, not when the gate opens
        assert len(serving.running) == 1
        serving.release()
        pushing.join(SOON)
        assert not pushing.is_alive()
        assert spans(first.result(SOON)) == [("v1", 0, 6)]
        assert spans(held.result(SOON)) == [("v2", 0, 6)]


def test_a_drain_does_not_wait_for_tools(fleet: Fleet) -> None:
    started, go = threading.Event(), threading.Event()

    async def works(text: str) -> str:
        started.set()
        while not go.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return "end"

    def says(token_ids: list[int]) -> str:
        return "<say>x</say>" if len(token_ids) == 3 else "ok"

    actor = fleet.actor(FakeServing(says), inflight_updates=False, tools=[Say(works)], tool_parser=TaggedParser)
    with WeightSync(weights(2), [actor]) as sync:
        future = actor.submit(fleet.ask("a"))
        assert started.wait(SOON)
        sync.push("v1")
        go.set()
        assert [version for version, _, _ in spans(future.result(SOON))] == ["default", "v1"]


def test_a_drain_that_takes_too_long_leaves_the_engine_at_work_with_what_it_has(fleet: Fleet) -> None:
    serving = FakeServing("abcdef", hold=3)
    actor = fleet.actor(serving, inflight_updates=False, drain_timeout=0.05)
    with WeightSync(weights(2), [actor]) as sync:
        sync.push("v1")
        future = actor.submit(fleet.ask("slow"))
        wait(lambda: serving.running)
        with pytest.raises(SyncError, match="did not end 1 turns") as raised:
            sync.push("v2")
        assert (raised.value.engines[0].serving, raised.value.engines[0].version) == ("old", "v1")
        assert actor.status().closed == []
        serving.release()
        assert spans(future.result(SOON)) == [("v1", 0, 6)]
        sync.push("v3")


def test_a_drain_that_its_trainer_has_given_up_on_does_not_outlast_the_resume(fleet: Fleet) -> None:
    """What a trainer in another process has asked for goes on here when nobody waits for it."""
    serving = FakeServing("abcdef", hold=3)
    actor = fleet.actor(serving, inflight_updates=False)
    future = actor.submit(fleet.ask("slow"))
    wait(lambda: serving.running)
    pausing = threading.Thread(target=lambda: asyncio.run(actor.pause("keep")))
    resuming = threading.Thread(target=lambda: asyncio.run(actor.resume()))
    pausing.start()
    wait(lambda: actor.status().closed == ["update"])
    resuming.start()
    serving.release()
    for thread in (pausing, resuming):
        thread.join(SOON)
    assert future.result(SOON)
    assert (actor.status().closed, serving.weights.paused) == ([], False)


def test_stopping_while_a_push_drains_ends_both(fleet: Fleet) -> None:
    serving = FakeServing("abcdef", hold=3)
    actor = fleet.actor(serving, inflight_updates=False)
    with WeightSync(weights(2), [actor], timeout=5.0) as sync:
        sync.push("v1")
        actor.submit(fleet.ask("slow"))
        wait(lambda: serving.running)
        failures: list[Exception] = []

        def push() -> None:
            try:
                sync.push("v2")
            except Exception as error:
                failures.append(error)

        pushing = threading.Thread(target=push)
        pushing.start()
        wait(lambda: actor.status().closed == ["update"])
        assert actor.stop(timeout=0.2) == []
        pushing.join(SOON)
        assert not pushing.is_alive()
        assert len(failures) <= 1


def test_a_dirty_engine_holds_prompts_until_a_push_heals_it(fleet: Fleet) -> None:
    serving = FakeServing("abcdef")
    actor = fleet.actor(serving)
    with WeightSync(weights(2), [actor]) as sync:
        serving.weights.inject("tensor", tensor=1)
        with pytest.raises(ApplyError):
            sync.push("v1")
        assert actor.status().closed == ["dirty"]
        future = actor.submit(fleet.ask("waits"))
        time.sleep(0.05)
        assert not future.done()
        sync.push("v2")
        assert spans(future.result(SOON)) == [("v2", 0, 6)]
        actor.check_background_threads()


def test_a_result_that_is_too_old_is_made_again(fleet: Fleet) -> None:
    serving = FakeServing("abcdef", hold=3)
    actor = fleet.actor(serving, max_staleness=1)
    with WeightSync(weights(2), [actor]) as sync:
        sync.push("v1")
        fleet.prompts.put(fleet.ask("a", n=2))
        wait(lambda: len(serving.running) == 2)
        time.sleep(0.02)
        for version in ("v2", "v3"):
            sync.push(version)
        serving.release()
        result = fleet.results.get(timeout=SOON)
        assert spans(result) == [("v3", 0, 6)]
        assert actor.status().stale == 1
        assert fleet.results.empty()


def test_a_result_that_grows_old_while_the_queue_is_full_is_made_again(fleet: Fleet) -> None:
    actor = fleet.actor(FakeServing("abc"), max_staleness=0)
    fleet.results.maxsize = 1
    with WeightSync(weights(2), [actor]) as sync:
        sync.push("v1")
        for name in "ab":
            fleet.prompts.put(fleet.ask(name))
        wait(lambda: actor.status().answered == 2)
        sync.push("v2")
        wait(lambda: actor.status().stale == 1)
        assert spans(fleet.results.get(timeout=SOON)) == [("v1", 0, 3)]  # handed over before the push
        assert spans(fleet.results.get(timeout=SOON)) == [("v2", 0, 3)]
        wait(lambda: actor.status().prompts == 0)
        assert fleet.results.empty()


def test_pushes_that_come_too_fast_for_a_prompt_are_an_error_and_no_endless_repetition(fleet: Fleet) -> None:
    serving = FakeServing("abc")
    actor = fleet.actor(serving, max_staleness=0)
    actor._work.history.append("v9")  # which the engine does not say of any token
    with pytest.raises(GenerationError, match=f"too old {ATTEMPTS} times"):
        actor.submit(fleet.ask("a")).result(SOON)
    with pytest.raises(GenerationError):
        actor.check_background_threads()


def test_an_actor_that_awaits_weights_takes_its_first_prompt_after_a_push(fleet: Fleet) -> None:
    actor = fleet.actor(FakeServing("abcdef"), await_weights=True)
    fleet.prompts.put(fleet.ask("a"))
    time.sleep(0.3)
    assert fleet.results.empty()
    with WeightSync(weights(2), [actor]) as sync:
        sync.push("v1")
        assert spans(fleet.results.get(timeout=SOON)) == [("v1", 0, 6)]


def test_prefix_cache_and_sizes_are_to_be_had(fleet: Fleet) -> None:
    serving = FakeServing()
    actor = fleet.actor(serving)
    assert actor.reset_prefix_cache()
    assert serving.resets == 1
    assert actor.kv_cache_info().samples == actor.get_kv_cache_info() == 4
    assert actor.get_model_dims().hidden_size == 8
    assert actor.ready()
