"""Two trainers and one engine: whoever has prepared a version has the engine until it serves that version under its label,
or until the push has failed. What the other one asks meanwhile is refused, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from helpers.hanging import hang
from helpers.named_weights import WEIGHTS, Trainer, engine_named, serves

from instep import MemoryEngine
from instep.engine import CachePolicy
from instep.engine.remote.rpc import Endpoint, LocalRpc, RemoteEngine
from instep.errors import EngineBusy, EngineTimeout, InstepError, PlanError, VersionConflict
from unit.engine.test_late import LateEngine
from unit.test_trust import AtOnceEngine

pytestmark = pytest.mark.usefixtures("segments")

WAYS: dict[str, Callable[[MemoryEngine], Any]] = {
    "step by step": lambda engine: engine,
    "at once": lambda engine: engine,
    "remote": lambda engine: RemoteEngine(LocalRpc(Endpoint(engine).answer)),
}


def reached(way: str) -> tuple[MemoryEngine, Any]:
    engine = (AtOnceEngine if way == "at once" else MemoryEngine)(WEIGHTS["start"])
    return engine, WAYS[way](engine)


def interrupted(engine: MemoryEngine, point: str, then: Callable[[], object]) -> None:
    """Another trainer comes in the middle of the next call of `point`."""
    original = getattr(engine, point)

    async def call(*arguments: Any) -> Any:
        if arguments[:1] != ("hello",):
            delattr(engine, point)
            await asyncio.to_thread(then)
        return await original(*arguments)

    setattr(engine, point, call)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", ["pause", "label", "resume"])
def test_another_trainer_is_refused_until_the_label_is_there_and_the_engine_goes_on(way: str, point: str) -> None:
    engine, handle = reached(way)
    first, second = Trainer(handle), Trainer(handle)

    def intrude() -> None:
        paused, label = engine.paused, engine.version
        with pytest.raises(VersionConflict, match="another trainer is pushing 'a' to this engine") as caught:
            second.push("b")
        assert isinstance(caught.value, EngineBusy)
        second.sync.status()
        assert (engine.paused, engine.version, engine.refusal) == (paused, label, None)

    interrupted(engine, point, intrude)
    first.push("a")
    assert serves(engine) == ("a", "a")
    second.push("b")  # at once: nothing is left of the first
    assert serves(engine) == ("b", "b")


@pytest.mark.parametrize("way", WAYS)
def test_a_push_that_has_failed_keeps_nobody_away(way: str) -> None:
    engine, handle = reached(way)
    first, second = Trainer(handle), Trainer(handle)
    engine.inject("tensor", tensor=3)
    with pytest.raises(InstepError):
        first.push("a")
    second.push("b")
    assert serves(engine) == ("b", "b")


@pytest.mark.usefixtures("deadlines")
def test_a_trainer_that_asks_after_its_late_commit_does_not_have_the_engine_go_on_for_another() -> None:
    engine = LateEngine(WEIGHTS["start"])
    first, second = Trainer(engine), Trainer(engine)
    engine.late = True
    with pytest.raises(EngineTimeout):
        first.push("a")
    engine.receivers[0].lease.end()  # as it does after minutes
    told: list[Any] = []
    interrupted(engine, "label", lambda: told.append((first.sync.status(), engine.paused, engine.version)))
    second.push("b")
    assert told[0][1:] == (True, None)
    assert serves(engine) == ("b", "b")
    assert first.sync.status()[0].version == "b"


def failing(error: InstepError) -> Callable[[Any, Any], Any]:
    def open_reader(*_: Any) -> Any:
        raise error

    return open_reader


@pytest.mark.parametrize("require", ["all", "any"])
@pytest.mark.parametrize("worker", [0, 1])
def test_workers_that_prepared_well_are_free_again_where_another_could_not(worker: int, require: Any) -> None:
    engine = MemoryEngine(WEIGHTS["start"], tp=2)
    first, second = Trainer(engine, engine_named("other"), require=require), Trainer(engine)
    opens = engine.receivers[worker].open_reader
    engine.receivers[worker].open_reader = failing(PlanError("told to fail"))
    if require == "all":
        with pytest.raises(PlanError, match="told to fail"):
            first.push("a")
    else:
        assert [state.engine for state in first.push("a").failed] == ["memory"]
    assert [receiver.prepared for receiver in engine.receivers] == [None, None]
    engine.receivers[worker].open_reader = opens
    second.push("b")
    assert engine.fingerprint() == MemoryEngine(WEIGHTS["b"], tp=2).fingerprint()


class Stuck(MemoryEngine):
    """Its next preparation works and answers too late, and so do calls after that while it is stuck."""

    stuck = False

    async def call(self, method: Any, payload: bytes) -> list[bytes]:
        if self.stuck and method == "abort":
            await asyncio.Event().wait()
        replies = await super().call(method, payload)
        if self.stuck and method == "prepare":
            await hang()
        return replies


@pytest.mark.usefixtures("deadlines")
def test_closing_a_trainer_lets_others_in_at_an_engine_that_was_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.engine.fleet.HURRY", 0.05)
    engine = Stuck(WEIGHTS["start"])
    first, second = Trainer(engine), Trainer(engine)
    engine.stuck = True
    with pytest.raises(EngineTimeout):
        first.push("a")
    engine.stuck = False
    with pytest.raises(EngineBusy):
        second.push("b")
    first.sync.close()
    second.push("b")
    assert serves(engine) == ("b", "b")


class Patient(MemoryEngine):
    """Counts how often it was paused and went on."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.turns: list[str] = []

    async def pause(self, caches: CachePolicy) -> None:
        self.turns.append("pause")
        await super().pause(caches)

    async def resume(self) -> None:
        self.turns.append("resume")
        await super().resume()


def test_a_refused_push_does_not_touch_the_others_pause() -> None:
    engine = Patient(WEIGHTS["start"])
    first, second = Trainer(engine), Trainer(engine)
    second.push("c")
    engine.turns.clear()

    def intrude() -> None:
        with pytest.raises(VersionConflict):
            second.push("b")

    interrupted(engine, "label", intrude)
    first.push("a")
    assert engine.turns == ["pause", "resume"]
