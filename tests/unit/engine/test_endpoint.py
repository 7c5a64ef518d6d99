"""An engine whose trainer goes away in the middle of a push, at each point of it: it goes on with one whole version, or refuses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from helpers.toys import attention
from hypothesis import given
from hypothesis import strategies as st

from instep import MemoryEngine, WeightSync
from instep.engine import fleet
from instep.engine.remote import rpc
from instep.engine.remote.rpc import GONE, Endpoint, LocalRpc, Outcome, RemoteEngine
from instep.errors import EngineDirty, EngineLost, EngineTimeout, SyncError, VersionConflict
from instep.protocol import Request, decode, encode, raw

OLD, NEW, LATER = map(attention, range(3))
HOLDS = {MemoryEngine(weights).fingerprint(): name for name, weights in (("old", OLD), ("new", NEW), ("later", LATER))}


class CutRpc(LocalRpc):
    """A trainer that is gone as soon as it comes to `point`, before or after its request was answered."""

    point, after, gone = "", False, False

    async def call(self, method: str, payload: bytes) -> bytes:
        name = msgspec.msgpack.decode(payload)[0] if method == "call" else method
        self.gone = self.gone or (name == self.point and not self.after)
        if self.gone:
            raise EngineLost("the trainer is gone: nothing it does arrives")
        answer = await super().call(method, payload)
        self.gone = name == self.point
        return answer


def trainer(engine: MemoryEngine) -> tuple[WeightSync, CutRpc, Endpoint]:
    endpoint = Endpoint(engine, timeout=1000)
    rpc = CutRpc(endpoint.answer)
    return WeightSync(NEW, [RemoteEngine(rpc)]), rpc, endpoint


class Clock:
    """Timers whose time has come when a test says so: a busy machine must not be taken for a trainer that went away."""

    def __init__(self) -> None:
        self.running: list[Clock.Timer] = []

    class Timer:
        daemon = False

        def __init__(self, clock: Clock, seconds: float, action: Callable[[], None]) -> None:
            self.clock, self.seconds, self.action = clock, seconds, action

        def start(self) -> None:
            self.clock.running.append(self)

        def cancel(self) -> None:
            if self in self.clock.running:
                self.clock.running.remove(self)

    def timer(self, seconds: float, action: Callable[[], None]) -> Timer:
        return self.Timer(self, seconds, action)

    def expire(self) -> list[float]:
        """The time of every timer comes. Returns what they had been set to."""
        expired, self.running = self.running, []
        for timer in expired:
            timer.action()
        return [timer.seconds for timer in expired]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, segments: object) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rpc, "threading", SimpleNamespace(Timer=clock.timer, Lock=threading.Lock))
    return clock


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", ["hello", "trace", "prepare", "ready", "pause", "commit", "label", "resume", "refuse"])
def test_it_goes_on_with_one_whole_version_under_its_label(clock: Clock, point: str, after: bool) -> None:
    engine = MemoryEngine(OLD)
    sync, way, endpoint = trainer(engine)
    way.point, way.after = point, after
    try:
        sync.push("v1")
    except SyncError:
        assert (point, after) != ("refuse", True)
    left_paused = point in ("commit", "label") or (point, after) in (("pause", True), ("resume", False))
    prepared = point == "ready" or (point, after) in (("prepare", True), ("pause", False))
    assert engine.paused == left_paused
    assert clock.expire() == [1000] * (left_paused or prepared)
    committed = point in ("label", "resume", "refuse") or (point, after) == ("commit", True)
    assert (engine.paused, engine.version) == (False, "v1" if committed else None)
    assert endpoint.version == engine.version
    assert HOLDS[engine.fingerprint()] == ("new" if committed else "old")
    assert engine.generate([1, 2], 3)
    with WeightSync(LATER, [RemoteEngine(LocalRpc(Endpoint(engine).answer))]) as another:
        another.push("v2")
    assert (HOLDS[engine.fingerprint()], engine.version) == ("later", "v2")


def test_one_that_holds_no_whole_version_refuses(clock: Clock) -> None:
    engine = MemoryEngine(OLD)
    engine.inject("tensor", tensor=3)
    sync, way, _ = trainer(engine)
    way.point, way.after = "commit", True
    with pytest.raises(SyncError):
        sync.push("v1")
    clock.expire()
    with pytest.raises(EngineDirty, match="its trainer went away in the middle of a push"):
        engine.generate([1], 1)


@pytest.mark.parametrize("end", ["the connection breaks", "abort"])
def test_a_trainer_that_goes_while_the_engine_is_paused_is_not_waited_for(clock: Clock, end: str) -> None:
    engine = MemoryEngine(OLD)
    sync, way, endpoint = trainer(engine)
    way.point, way.after = "pause", True
    with pytest.raises(SyncError):
        sync.push("v1")
    abort = encode(("abort", encode(Request(99, endpoint.session or "", raw(None)))))
    asyncio.run(endpoint.answer("call", abort) if end == "abort" else endpoint.answer(GONE, b""))
    assert (clock.expire(), engine.paused) == ([0], False)


def test_what_a_trainer_had_prepared_keeps_nobody_away_when_its_connection_breaks(clock: Clock) -> None:
    engine: Any = MemoryEngine(OLD)
    sync, way, endpoint = trainer(engine)
    way.point, way.after = "prepare", True
    with pytest.raises(SyncError):
        sync.push("v1")
    assert engine.receivers[0].prepared is not None
    asyncio.run(endpoint.answer(GONE, b""))
    assert clock.expire() == [0]
    assert engine.receivers[0].prepared is None
    with WeightSync(LATER, [RemoteEngine(LocalRpc(endpoint.answer))]) as another:
        another.push("v2")
    assert HOLDS[engine.fingerprint()] == "later"


def test_a_trainer_that_was_away_too_long_cannot_commit_into_a_running_engine(clock: Clock) -> None:
    """It stopped between pause and commit, the engine went on, and computes with the old weights now."""
    engine = MemoryEngine(OLD)
    endpoint = Endpoint(engine, timeout=7)

    class Stopped(LocalRpc):
        async def call(self, method: str, payload: bytes) -> bytes:
            if method == "call" and msgspec.msgpack.decode(payload)[0] == "commit":
                assert await asyncio.to_thread(clock.expire) == [7]
            return await super().call(method, payload)

    with WeightSync(NEW, [RemoteEngine(Stopped(endpoint.answer))]) as sync:
        with pytest.raises(SyncError, match=r"left paused for more than 7 s") as caught:
            sync.push("v1")
        assert isinstance(caught.value, EngineTimeout)
        assert [(state.serving, state.version) for state in caught.value.engines] == [("old", None)]
    assert HOLDS[engine.fingerprint()] == "old"
    assert engine.generate([1], 1)


def test_a_request_is_given_up_when_the_trainer_has_given_it_up(clock: Clock) -> None:
    """Where the way to the engine has places for so many requests, as a Ray actor has, those that hang must not fill them."""
    engine = MemoryEngine(OLD)
    endpoint = Endpoint(engine)

    async def answer(method: str, payload: bytes) -> bytes:
        hangs = method == "call" and decode(payload, tuple[str, bytes])[0] == "commit" and engine.calls.count("commit") == 0
        endpoint.timeout = 0.1 if hangs else 60
        return await endpoint.answer(method, payload)

    with WeightSync(NEW, [RemoteEngine(LocalRpc(answer))]) as sync:
        engine.inject("commit", "hang")
        with pytest.raises(EngineTimeout, match="did not answer commit"):
            sync.push("v1")
        assert (endpoint.running, engine.refusal is not None) == (0, True)  # a commit that is late may still come
        sync.push("v2")
    assert (HOLDS[engine.fingerprint()], engine.refusal) == ("new", None)


def test_a_trainer_that_answers_is_not_interrupted(clock: Clock) -> None:
    engine = MemoryEngine(OLD)
    sync, _, endpoint = trainer(engine)
    for version in ("v1", "v2", "v3"):
        sync.push(version)
        assert clock.running == []
    assert (endpoint.version, engine.version, engine.calls.count("hello")) == ("v3", "v3", 1)


@pytest.mark.parametrize("point", ["commit", "label", "resume"])
def test_another_trainer_that_is_refused_does_not_keep_the_dead_ones_time_from_passing(clock: Clock, point: str) -> None:
    engine = MemoryEngine(OLD)
    sync, way, endpoint = trainer(engine)
    way.point = point
    with pytest.raises(SyncError):
        sync.push("v1")
    running, session = list(clock.running), endpoint.session
    with WeightSync(LATER, [RemoteEngine(LocalRpc(endpoint.answer))]) as another:
        for _ in range(3):
            another.status()
            with pytest.raises(VersionConflict, match="another trainer is pushing 'v1'"):
                another.push("v2")
        assert (clock.running, endpoint.session, endpoint.timeout) == (running, session, 1000)
        assert clock.expire() == [1000]
        assert HOLDS[engine.fingerprint()] == ("old" if point == "commit" else "new")
        assert not engine.paused
        another.push("v2")
    assert (HOLDS[engine.fingerprint()], engine.version) == ("later", "v2")


class Slow(MemoryEngine):
    """Prepares a version when another engine has heard of their trainer three times."""

    other: MemoryEngine

    async def call(self, method: Any, payload: bytes) -> list[bytes]:
        if method == "prepare":
            while self.other.calls.count("status") < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return await super().call(method, payload)


def test_an_engine_that_waits_for_a_slower_one_hears_that_its_trainer_lives(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "OFTEN", 10_000)
    slow, quick = Slow(OLD, name="slow"), MemoryEngine(OLD, name="quick")
    slow.other = quick
    endpoint = Endpoint(quick, timeout=1000)
    with WeightSync(NEW, [slow, RemoteEngine(LocalRpc(endpoint.answer))]) as sync:
        assert len(sync.push("v1").engines) == 2
    assert (clock.running, quick.calls.count("hello")) == ([], 1)


@pytest.mark.parametrize("point", ["resume", "refuse"])
def test_a_trainer_that_dies_when_the_engine_goes_on_keeps_nobody_away(clock: Clock, point: str) -> None:
    engine = MemoryEngine(OLD)
    sync, way, endpoint = trainer(engine)
    way.point, way.after = point, point == "resume"
    with pytest.raises(SyncError):
        sync.push("v1")
    assert clock.running == []
    with WeightSync(LATER, [RemoteEngine(LocalRpc(endpoint.answer))]) as another:
        another.push("v2")
    assert (HOLDS[engine.fingerprint()], engine.version) == ("later", "v2")


def test_a_trainer_that_dies_in_a_failed_commit_keeps_nobody_away(clock: Clock) -> None:
    engine: Any = MemoryEngine(OLD)
    engine.inject("tensor", tensor=3)
    sync, way, endpoint = trainer(engine)
    way.point, way.after = "refuse", True
    with pytest.raises(SyncError):
        sync.push("v1")
    assert clock.expire() == [1000]
    assert engine.refusal is not None
    with WeightSync(LATER, [RemoteEngine(LocalRpc(endpoint.answer))]) as another:
        another.push("v2")
    assert (HOLDS[engine.fingerprint()], engine.version, engine.refusal) == ("later", "v2", None)


def test_time_passes() -> None:
    """With the timers that there really are."""
    engine = MemoryEngine(OLD)
    endpoint = Endpoint(engine, timeout=0.05)
    asyncio.run(endpoint.answer("pause", encode(("reset",))))
    deadline = time.monotonic() + 20
    while engine.paused:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@given(
    method=st.one_of(st.sampled_from(["call", "pause", "label", "score", "refuse", "resume", GONE]), st.text(max_size=8)),
    payload=st.binary(),
)
def test_no_bytes_make_it_raise_or_change_the_engine(method: str, payload: bytes) -> None:
    engine = ENGINE
    before = HOLDS[engine.fingerprint()]
    outcome = decode(asyncio.run(Endpoint(engine, 1000).answer(method, payload)), Outcome)
    assert outcome.fault is not None or method in ("resume", GONE) or msgspec.msgpack.decode(payload) is not None
    assert HOLDS[engine.fingerprint()] == before


ENGINE = MemoryEngine(OLD)


@given(name=st.text(max_size=8), payload=st.binary(max_size=64))
def test_no_request_of_the_receivers_protocol_makes_it_raise(name: str, payload: bytes) -> None:
    for method in (name, "hello", "commit", "prepare"):
        decode(asyncio.run(Endpoint(ENGINE, 1000).answer("call", encode((method, payload)))), Outcome)
    assert HOLDS[ENGINE.fingerprint()] == "old"
