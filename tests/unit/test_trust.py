"""A push does not ask engines who they are where the last one has left them: they say so themselves if they are others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from helpers.pretend_cuda import pretend, pretend_nccl
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.engine import CachePolicy
from instep.engine.fused_commit import add_up, step_by_step
from instep.errors import (
    ApplyError,
    DigestMismatch,
    EngineBusy,
    EngineDirty,
    EngineLost,
    VersionConflict,
)
from instep.plan.buckets import ALIGN
from instep.protocol import WorkerReceipt
from instep.receiver.arrival import Pulled
from instep.receiver.proof import Proof
from instep.receiver.stream import Streamed

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
        assert restarts.calls[:6] == ["prepare", "abort", "hello", "trace", "decide", "prepare"]
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


ALL_AT_ONCE = ["at once", "reserve", "pause", "commit", "label", "resume", "abort"]


class AtOnceEngine(MemoryEngine):
    """Goes through a commit in one call, as vLLM with the plugin does."""

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        self.calls.append("at once")
        return await step_by_step(self, payload, caches, version)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_commit_at_once(tp: int) -> None:
    engine, source = AtOnceEngine(START, tp=tp), dict(ONE)
    with WeightSync(source, [engine]) as sync:
        for version, weights in (("one", ONE), ("two", TWO)):
            source.update(weights)
            engine.calls.clear()
            sync.push(version)
            assert engine.calls[-7:] == ALL_AT_ONCE
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
        assert (engine.version, engine.calls[-3:]) == (None, ["pause", "commit", "abort"])
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


@pytest.fixture(params=product(["ipc", "nccl"], [1, 2]), ids=lambda param: f"{param[0]}, {param[1]} workers")
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WeightSync, AtOnceEngine, dict[str, Any]]]:
    """A trainer, and the only engine that it pushes to. The bytes are moved in the commit."""
    pretend_nccl(monkeypatch, ALIGN)
    transport, tp = request.param
    engine, source = AtOnceEngine(START, tp=tp), {name: tensor.clone() for name, tensor in ONE.items()}
    with WeightSync(source, [engine], transport=transport, timeout=20) as sync:
        sync.push("one")
        engine.calls.clear()
        yield sync, engine, source


def fill(source: dict[str, Any], weights: dict[str, Any]) -> None:
    """Another version, in the same memory."""
    for name, tensor in source.items():
        tensor.copy_(weights[name])


def wrong(proof: Proof) -> Proof:
    parts = {name: {at: part + 1 for at, part in some.items()} for name, some in proof.parts.items()}
    return replace(proof, parts=parts)


def test_an_engine_alone_is_prepared_in_its_commit_and_looks_at_the_trainers_sums_by_itself(alone: Any) -> None:
    sync, engine, source = alone
    for version, weights in (("two", TWO), ("three", START)):
        fill(source, weights)
        engine.calls.clear()
        receipt = sync.push(version, base=engine.version)
        together = ["accept"] * (len(engine.hosts) > 1)  # no worker has proved all of it
        assert engine.calls == [*ALL_AT_ONCE[:4], *together, *ALL_AT_ONCE[4:]]
        assert (engine.version, engine.paused, same(engine, weights)) == (version, False, True)
        assert "prepare" not in receipt.seconds


def test_several_engines_are_prepared_before_any_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    engines, source = [AtOnceEngine(START, name=name) for name in "ab"], {name: tensor.clone() for name, tensor in ONE.items()}
    with WeightSync(source, engines, transport="ipc") as sync:
        sync.push("one")
        fill(source, TWO)
        engines[0].calls.clear()
        engines[1].inject("prepare")
        with pytest.raises(EngineLost):
            sync.push("two")
        assert engines[0].calls == ["prepare", "abort"]
        assert all(same(engine, ONE) for engine in engines)


def test_an_engine_alone_that_was_restarted_is_brought_along(alone: Any) -> None:
    sync, engine, source = alone
    vars(engine).update(vars(engine.restart(START)))
    fill(source, TWO)
    sync.push("two")
    assert engine.calls[:7] == ["at once", "reserve", "pause", "commit", "resume", "resume", "abort"]
    assert (engine.version, engine.paused, same(engine, TWO)) == ("two", False, True)


def test_an_engine_alone_that_another_trainer_has_pushed_to_goes_on_with_that(alone: Any) -> None:
    sync, engine, source = alone
    with WeightSync(TWO, [engine], transport="shm") as other:
        other.push("others")
    fill(source, START)
    with pytest.raises(VersionConflict, match="another trainer pushes to it"):
        sync.push("two")
    assert (engine.version, engine.paused, same(engine, TWO)) == ("others", False, True)
    assert engine.generate([1], 1)


def test_an_engine_alone_that_another_trainer_pushes_to_is_not_touched(alone: Any) -> None:
    """Whoever pushes has paused it, or will: it must not be resumed in the middle of that."""
    sync, engine, source = alone
    engine.receivers[-1].lease.take(time.monotonic(), "another", "theirs", 60)
    fill(source, TWO)
    with pytest.raises(EngineBusy, match="another trainer is pushing 'theirs' to this engine"):
        sync.push("two")
    assert engine.calls[:3] == ["at once", "reserve", "abort"]
    assert {"pause", "commit", "label", "resume"}.isdisjoint(engine.calls)
    assert [receiver.lease.session for receiver in engine.receivers[:-1]] == [None] * (len(engine.hosts) - 1)
    engine.receivers[-1].lease.end()
    sync.push("three")
    assert (engine.version, engine.paused, same(engine, TWO)) == ("three", False, True)


def test_an_engine_alone_that_does_not_serve_the_base_keeps_what_it_serves(alone: Any) -> None:
    sync, engine, source = alone
    fill(source, TWO)
    with pytest.raises(VersionConflict, match="follows 'zero', but the engine serves 'one'"):
        sync.push("two", base="zero")
    assert (engine.version, engine.paused, same(engine, ONE)) == ("one", False, True)


def test_an_engine_whose_sums_differ_is_not_resumed(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, engine, source = alone
    fill(source, TWO)
    for kind in (Pulled, Streamed):
        monkeypatch.setattr(kind, "prove", lambda self, _, prove=kind.prove: wrong(prove(self, _)))
    with pytest.raises(DigestMismatch, match="DIRTY"):
        sync.push("two")
    assert (engine.version, engine.calls) == ("one", ["at once", "reserve", "pause", "commit", "abort"])
    with pytest.raises(EngineDirty):
        engine.generate([1], 1)


def receipt(theirs: dict[str, int], parts: dict[str, Any], wholes: dict[str, int] | None = None) -> WorkerReceipt:
    """parts: one sum of each tensor, or several by the numbers of regions."""
    numbered = {name: sums if isinstance(sums, dict) else {0: sums} for name, sums in parts.items()}
    return WorkerReceipt(0, {}, [], [], {}, 1, theirs=theirs, parts=numbered, wholes=wholes or {})


THEIRS = {"w": 7, "norm": 3}
HALVES = [receipt(THEIRS, {"w": part, "norm": 3}) for part in (2, 5)]


@pytest.mark.parametrize(
    ("receipts", "proved"),
    [
        ([receipt({}, {})], False),
        (HALVES, True),
        (HALVES[:1], False),
        ([*HALVES, HALVES[0]], True),  # two hold the same part
        ([HALVES[0], receipt(THEIRS, {"w": 6, "norm": 3})], False),
        ([HALVES[0], receipt(THEIRS, {"w": 5, "norm": 4})], False),
        ([HALVES[0], receipt(THEIRS, {"w": 5, "norm": 0})], False),  # one that has zeros
        ([HALVES[0], receipt(THEIRS, {"w": 5}, {"norm": 3})], True),
        ([HALVES[0], receipt(THEIRS, {"w": 5}, {"norm": 4})], False),
        ([HALVES[0], receipt({"w": 8, "norm": 3}, {"w": 5, "norm": 3})], False),  # of another version
        ([HALVES[0], receipt({}, {"w": 5, "norm": 3})], False),
        ([receipt({"w": 0}, {"w": 1}), receipt({"w": 0}, {"w": (1 << 64) - 1})], True),
        ([receipt(THEIRS, {"w": {0: 2, 1: 4}, "norm": 3}), receipt(THEIRS, {"w": {0: 1, 1: 4}, "norm": 3})], True),  # they share 4
        ([receipt(THEIRS, {"w": {0: 2, 1: 4}, "norm": 3}), receipt(THEIRS, {"w": {0: 1, 1: 9}, "norm": 3})], False),
        ([HALVES[0], receipt(THEIRS, {"norm": 3}, {"w": 7})], False),  # a part beside a whole
        ([HALVES[0], receipt(THEIRS, {"w": 5, "norm": 3}, {"w": 7})], True),
    ],
)
def test_workers_have_proved_together_what_they_hold_if_it_adds_up(receipts: list[WorkerReceipt], proved: bool) -> None:
    assert add_up(receipts) == proved
