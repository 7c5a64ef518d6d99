"""A push does not ask engines who they are where the last one has left them: they say so themselves if they are others."""

from __future__ import annotations

from typing import Any

import pytest
from pretend_cuda import pretend
from toys import attention

from instep import MemoryEngine, WeightSync
from instep.digest import seed_of
from instep.engine import CachePolicy
from instep.engine.at_once import goes_on
from instep.errors import ApplyError, DigestMismatch, EngineDirty, EngineLost, VersionConflict
from instep.receiver.request import Expected
from instep.transport import ipc

pytestmark = pytest.mark.usefixtures("segments")
START, ONE, TWO = map(attention, range(3))


def same(engine: MemoryEngine, weights: dict[str, Any]) -> bool:
    return engine.fingerprint() == MemoryEngine(weights, tp=len(engine.hosts)).fingerprint()


def test_an_engine_that_is_known_is_not_asked() -> None:
    engine, source = MemoryEngine(START), dict(ONE)
    with WeightSync(source, [engine]) as sync:
        sync.push("one")
        engine.calls.clear()
        source.update(TWO)
        receipt = sync.push("two")
    assert {"hello", "trace"}.isdisjoint(engine.calls)
    assert "connect" not in receipt.seconds
    assert same(engine, TWO)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_one_that_was_restarted_is_brought_along(transport: Any) -> None:
    stays, restarts, source = MemoryEngine(START, name="stays"), MemoryEngine(START, name="restarts"), dict(ONE)
    with WeightSync(source, [stays, restarts], transport=transport, timeout=20) as sync:
        sync.push("one")
        vars(restarts).update(vars(restarts.restart(START)))
        source.update(TWO)
        sync.push("two")
        assert restarts.calls[:4] == ["prepare", "hello", "trace", "prepare"]
        assert same(stays, TWO)
        assert same(restarts, TWO)
        source.update(ONE)
        sync.push("three")
        assert restarts.calls.count("hello") == 1


def test_one_that_another_trainer_has_pushed_to_is_left_alone() -> None:
    engine = MemoryEngine(START)
    with WeightSync(ONE, [engine]) as mine, WeightSync(TWO, [engine]) as other:
        mine.push("mine")
        other.push("others")
        with pytest.raises(VersionConflict, match="another trainer pushes to it"):
            mine.push("mine-again")
    assert (engine.version, same(engine, TWO)) == ("others", True)


def test_one_whose_push_failed_is_asked() -> None:
    engine = MemoryEngine(START)
    with WeightSync(ONE, [engine]) as sync:
        sync.push("one")
        engine.inject("prepare")
        with pytest.raises(EngineLost):
            sync.push("two")
        engine.calls.clear()
        sync.push("three")
    assert engine.calls[0] == "hello"


def test_of_several_engines_that_need_not_all_follow_each_is_asked() -> None:
    """One that is gone must not be part of a broadcast."""
    engines = [MemoryEngine(START, name=name) for name in "ab"]
    with WeightSync(ONE, engines, require="any", transport="gloo", timeout=20) as sync:
        sync.push("one")
        engines[0].dead = True
        assert [state.engine for state in sync.push("two").failed] == ["a"]
    assert engines[1].version == "two"


class AtOnceEngine(MemoryEngine):
    """Goes through a commit in one call, as vLLM with the plugin does."""

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        self.calls.append("at once")
        await super().pause(caches)
        answers = await super().call("commit", payload)
        if goes_on(answers):
            await super().label(version)
            await super().resume()
        return answers


@pytest.mark.parametrize("tp", [1, 2])
def test_a_commit_at_once(tp: int) -> None:
    engine, source = AtOnceEngine(START, tp=tp), dict(ONE)
    with WeightSync(source, [engine]) as sync:
        for version, weights in (("one", ONE), ("two", TWO)):
            source.update(weights)
            engine.calls.clear()
            sync.push(version)
            assert engine.calls[-5:] == ["at once", "pause", "commit", "label", "resume"]
            assert (engine.version, engine.paused, same(engine, weights)) == (version, False, True)
            assert engine.generate([1], 1)


def test_a_commit_at_once_that_fails_leaves_the_engine_dirty_and_the_next_one_heals_it() -> None:
    engine, source = AtOnceEngine(START), dict(ONE)
    with WeightSync(source, [engine]) as sync:
        engine.inject("tensor", tensor=3)
        with pytest.raises(ApplyError, match="DIRTY"):
            sync.push("one")
        with pytest.raises(EngineDirty):
            engine.generate([1], 1)
        assert (engine.version, engine.calls[-2:]) == (None, ["pause", "commit"])
        source.update(TWO)
        sync.push("two")
        assert (engine.version, engine.paused, same(engine, TWO)) == ("two", False, True)


def test_a_commit_at_once_that_is_refused_leaves_the_engine_as_it_was() -> None:
    engine, source = AtOnceEngine(START), dict(ONE)
    with WeightSync(source, [engine]) as sync:
        sync.push("one")
        source.update(TWO)
        engine.inject("digest")
        with pytest.raises(DigestMismatch):
            sync.push("two")
        assert "at once" not in engine.calls[-3:]
        assert (engine.paused, same(engine, ONE)) == (False, True)


def test_where_the_bytes_are_the_trainers_own_a_worker_compares_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    engine, source = AtOnceEngine(START), dict(ONE)
    with WeightSync(source, [engine], transport="ipc") as sync:
        for version in ("one", "two"):
            sync.push(version)
            assert engine.calls[-5:] == ["at once", "pause", "commit", "label", "resume"]
        monkeypatch.setattr(Expected, "sums", lambda *_: None)  # it has not seen all of each tensor: the trainer adds up
        sync.push("three")
        assert (engine.version, engine.paused, engine.calls[-2:]) == ("three", False, ["label", "resume"])


def test_an_engine_whose_sums_differ_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    engine, source = AtOnceEngine(START), dict(ONE)
    with WeightSync(source, [engine], transport="ipc") as sync:
        sync.push("one")
        monkeypatch.setattr(ipc, "seed_of", lambda meta: seed_of(meta) + 1)
        with pytest.raises(DigestMismatch, match="DIRTY"):
            sync.push("two")
        assert (engine.version, engine.calls[-3:]) == ("one", ["at once", "pause", "commit"])
        with pytest.raises(EngineDirty):
            engine.generate([1], 1)
