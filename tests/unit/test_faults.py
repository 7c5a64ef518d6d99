"""Every point at which an engine can fail x every way to fail x every setting: what the error says of each engine is true.

Invariant 1: all or nothing. Invariant 2: known states. Invariant 3: no unbounded wait. Afterwards one call heals.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
from helpers.toys import attention, differing

from instep import MemoryEngine, WeightSync
from instep.errors import ApplyError, DigestMismatch, EngineDirty, EngineLost, EngineState, EngineTimeout, SyncError, VersionConflict
from instep.receipt import Receipt

pytestmark = pytest.mark.usefixtures("segments")

OLD, NEW, LATER = map(attention, range(3))
VERSIONS = ("old", "new", "later")
PROMPT = [1, 2, 3]
FRESH = {tp: dict(zip(VERSIONS, (MemoryEngine(weights, tp=tp) for weights in (OLD, NEW, LATER)), strict=True)) for tp in (1, 2)}
FINGERPRINTS = {tp: {engine.fingerprint(): version for version, engine in engines.items()} for tp, engines in FRESH.items()}
ANSWERS = {tp: {tuple(engine.generate(PROMPT, 8)): version for version, engine in engines.items()} for tp, engines in FRESH.items()}


def holds(engine: MemoryEngine) -> str:
    """Which weights an engine has, to the bit and in every worker; `mixed` for anything else."""
    tp = len(engine.hosts)
    version = FINGERPRINTS[tp].get(engine.fingerprint(), "mixed")
    if version != "mixed":
        for expected, found in zip(FRESH[tp][version].hosts, engine.hosts, strict=True):
            assert differing(expected.model, found.model) == []
    return version


def answers(engine: MemoryEngine) -> str:
    """Whose weights its answer comes from. Raises what `generate` raises."""
    return ANSWERS[len(engine.hosts)].get(tuple(engine.generate(PROMPT, 8)), "mixed")


def check_truth(state: EngineState, engine: MemoryEngine, before: str | None) -> None:
    """An engine is what the error says of it, and never generates from anything but one whole version under its own label."""
    match state.serving:
        case "old":
            assert (state.version, holds(engine), answers(engine), engine.version) == (before, "old", "old", before)
        case "new":
            assert (state.version, holds(engine), answers(engine), engine.version) == ("v-new", "new", "new", "v-new")
        case "dirty":
            with pytest.raises(EngineDirty):
                engine.generate(PROMPT, max_tokens=1)
        case "unknown":
            assert holds(engine) in ("old", "new")
            if not engine.dead:
                try:
                    assert answers(engine) == holds(engine)
                    assert engine.version == ("v-new" if holds(engine) == "new" else before)
                except EngineDirty:
                    pass  # to refuse is always safe


POINTS = ("hello", "trace", "prepare", "ready", "digest", "pause", "commit", "tensor", "label", "resume")
KINDS = ("error", "hang", "die")
CASES = [
    pytest.param(point, kind, require, tp, pushed, id=f"{point}-{kind}-{require}-tp{tp}-{'later' if pushed else 'first'}")
    for point, kind, require, tp in itertools.product(POINTS, KINDS, ("all", "any"), (1, 2))
    if kind == "error" or point not in ("digest", "tensor")  # these happen inside a worker
    # At the first push or at a later one. An engine is traced once; where all have to follow, it is not asked again who it is.
    for pushed in [tp == 2 and point != "trace" and (point, require) != ("hello", "all")]
]

BEFORE_COMMIT = ("hello", "trace", "prepare", "ready", "digest")


def expected_error(point: str, kind: str) -> type[SyncError]:
    inside = {"digest": DigestMismatch, "tensor": ApplyError}
    return inside.get(point, EngineTimeout if kind == "hang" else EngineLost)


@pytest.mark.usefixtures("apart", "deadlines")
@pytest.mark.parametrize(("point", "kind", "require", "tp", "pushed"), CASES)
def test_fault(point: Any, kind: Any, require: Any, tp: int, pushed: bool) -> None:
    bad, good = MemoryEngine(OLD, tp=tp, name="bad"), MemoryEngine(OLD, name="good")
    before = "v-old" if pushed else None
    source = dict(OLD)
    with WeightSync(source, [bad, good], require=require) as sync:
        if pushed:
            sync.push("v-old")
        source.update(NEW)
        bad.inject(point, kind, tensor=2)  # in a later push the loader gets the parts of a fused layer alone
        try:
            outcome: SyncError | Receipt = sync.push("v-new")
        except SyncError as error:
            outcome = error

        states = {state.engine: state for state in (sync._session.fleet.states() if isinstance(outcome, Receipt) else outcome.engines)}
        if require == "all":
            assert isinstance(outcome, expected_error(point, kind))
            assert states.keys() == {"bad", "good"}
            text = str(outcome)
            assert all(part in text for part in ("bad", "good", "next:"))
            assert all(str(replace(state, phase=None, reason=None)) in text for state in states.values())
            assert (states["bad"].reason or "nothing") in text
        else:
            assert isinstance(outcome, Receipt)
            assert [engine.engine for engine in outcome.engines] == ["good"]
            assert [state.engine for state in outcome.failed] == ["bad"]
            assert outcome.failed[0].reason
        check_truth(states["bad"], bad, before)
        check_truth(states["good"], good, before)
        assert states["bad"].serving == {"digest": "old", "tensor": "dirty"}.get(point, "unknown")
        assert states["good"].serving == ("old" if require == "all" and point in BEFORE_COMMIT else "new")

        heal(sync, bad, good, source)


def heal(sync: WeightSync, bad: MemoryEngine, good: MemoryEngine, source: dict[str, Any]) -> None:
    """A restarted engine catches up with one call, and the next good push reaches everybody."""
    if bad.dead:
        assert [state.serving for state in sync.status() if state.engine == "bad"] == ["unknown"]
        restarted = bad.restart(OLD)
        try:
            version = sync.catch_up(restarted).version
            assert (holds(restarted), answers(restarted), restarted.version) == (version.removeprefix("v-"),) * 2 + (version,)
            assert version == good.version
        except VersionConflict:  # what was published last reached nobody, and what was served before is not kept
            assert good.version != "v-new"
        bad = restarted
    source.update(LATER)
    sync.status()  # an engine that hung is asked again: a push would not wait for its answer
    receipt = sync.push("v-later")
    assert receipt.failed == ()
    for engine in (bad, good):
        assert (holds(engine), answers(engine), engine.version) == ("later", "later", "v-later")
    assert [state.serving for state in sync.status()] == ["old", "old"]


@pytest.mark.usefixtures("apart", "deadlines")
@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize("point", [point for point in POINTS if point not in ("digest", "tensor")])
def test_the_status_heals_an_engine_that_answers_again(point: Any, pushed: bool) -> None:
    """An engine that was late is asked what it holds; if that is one whole version, it goes on with it."""
    if point in ("trace", "hello") and pushed:  # an engine that is known is not asked again
        return
    engine = MemoryEngine(OLD)
    source = dict(OLD)
    with WeightSync(source, [engine]) as sync:
        if pushed:
            sync.push("v-old")
        source.update(NEW)
        engine.inject(point, "hang")
        with pytest.raises(EngineTimeout, match="memory did not answer"):
            sync.push("v-new")
        (state,) = sync.status()
        assert state.serving == "old"
        assert state.version == engine.version == {"old": "v-old" if pushed else None, "new": "v-new"}[holds(engine)]
        assert answers(engine) == holds(engine)
        assert (holds(engine) == "new") == (point in ("label", "resume"))


@pytest.mark.usefixtures("deadlines")
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_abort_changes_nothing(kind: Any) -> None:
    """... and the error that led to the abort is the one that is told."""
    bad, good = MemoryEngine(OLD, name="bad"), MemoryEngine(OLD, name="good")
    source = dict(NEW)
    with WeightSync(source, [bad, good]) as sync:
        bad.inject("digest")
        good.inject("abort", kind)
        with pytest.raises(DigestMismatch, match="bad: ") as caught:
            sync.push("v-new")
        assert "abort" in good.calls
        states = {state.engine: state for state in caught.value.engines}
        check_truth(states["bad"], bad, None)
        check_truth(states["good"], good, None)
        assert holds(good) == "old"
        if kind != "die":
            heal(sync, good, bad, source)


@pytest.mark.parametrize("require", ["all", "any"])
def test_a_stuck_engine_does_not_hold_up_the_other(require: Any) -> None:
    """Invariant 3, in real time: the other generates again while the stuck one is still waited for, and the push ends with the deadline."""
    stuck, other = MemoryEngine(OLD, name="stuck"), MemoryEngine(OLD, name="other")
    resume, resumed = other.resume, []

    async def noted() -> None:
        await resume()
        resumed.append(time.monotonic())

    other.resume = noted  # type: ignore[method-assign]
    with WeightSync(NEW, [stuck, other], require=require, timeout=1.0) as sync:
        stuck.inject("commit", "hang")
        started = time.monotonic()
        try:
            text = str(sync.push("v-new"))
        except EngineTimeout as error:
            text = str(error)
        assert 1.0 <= time.monotonic() - started < 8.0
    assert "stuck did not answer commit within 1 s" in text
    assert resumed[0] - started < 1.0
    assert answers(other) == "new"


@pytest.mark.parametrize("require", ["all", "any"])
def test_every_engine_fails(require: Any) -> None:
    engines = [MemoryEngine(OLD, name=name) for name in ("a", "b")]
    with WeightSync(NEW, engines, require=require) as sync:
        for engine in engines:
            engine.inject("prepare", "error")
        with pytest.raises(EngineLost) as caught:
            sync.push("v-new")
        assert [state.engine for state in caught.value.engines] == ["a", "b"]
        sync.push("v-new")
    assert [answers(engine) for engine in engines] == ["new", "new"]
