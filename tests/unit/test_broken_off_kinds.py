"""Pushes of every kind that are cancelled at each point at which they wait, and as users cancel them."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from helpers.interrupts import Interrupts
from helpers.named_weights import WEIGHTS, engine_named, serves
from helpers.waiting_engines import WAYS, Waiting, in_a_thread

from instep import MemoryEngine, WeightSync
from instep.engine import CachePolicy
from instep.engine.fused_commit import step_by_step
from instep.errors import ApplyError, EngineDirty
from instep.source.module import MappingSource

pytestmark = pytest.mark.usefixtures("segments")


class FusedCommit(Waiting):
    """Goes through a commit in one call, as a Ray actor does."""

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes]:
        return await step_by_step(self, payload, caches, version)


class Scored(MappingSource):
    """A source with a forward."""

    def score(self, token_ids: list[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)


KINDS: dict[str, tuple[type[Waiting], int, int, dict[str, Any]]] = {
    "two engines": (Waiting, 2, 1, {}),
    "two workers": (Waiting, 1, 2, {}),
    "one call": (FusedCommit, 1, 1, {}),
    "one call, two workers": (FusedCommit, 1, 2, {}),
    "over gloo": (Waiting, 1, 1, {"transport": "gloo"}),
    "over http": (Waiting, 1, 1, {"transport": "http"}),
    "with a canary": (Waiting, 1, 1, {"canary": [1, 2], "canary_bound": 1e9}),
    "any": (Waiting, 2, 1, {"require": "any"}),
}


@pytest.mark.parametrize(("kind", "number", "tp", "settings"), KINDS.values(), ids=KINDS)
def test_a_push_of_any_kind_that_is_cancelled(kind: type[Waiting], number: int, tp: int, settings: dict[str, Any]) -> None:
    fresh = {MemoryEngine(weights, tp=tp).fingerprint(): name for name, weights in WEIGHTS.items()}
    for at in itertools.count(1):
        engines = [kind(WEIGHTS["start"], tp=tp, name=f"engine-{index}") for index in range(number)]
        source = dict(WEIGHTS["a"])
        with WeightSync(Scored(source), engines, timeout=20, **settings) as sync:
            sync.push("a")
            source.update(WEIGHTS["b"])
            interrupts = Interrupts(at, "cancel")
            with suppress(asyncio.CancelledError):
                interrupts.run(lambda sync=sync: sync.apush("b"))
            for state, engine in zip(sync.status(), engines, strict=True):
                assert {one.lease.session for one in engine.receivers} == {None}
                try:
                    generated = in_a_thread(lambda engine=engine: engine.generate([1], 1))
                except EngineDirty:  # one of its workers had taken the version, and the end met the other
                    assert (tp, state.serving) == (2, "dirty")
                    continue
                assert len(generated) == 1
                assert fresh[engine.fingerprint()] == engine.version == state.version
            source.update(WEIGHTS["c"])
            sync.push("c")
            assert {(fresh[one.fingerprint()], one.version) for one in engines} == {("c", "c")}
        if not interrupts.done:
            break
    assert at > 8


@pytest.mark.parametrize("point", ["hello", "trace", "prepare", "pause", "commit", "label", "resume"])
@pytest.mark.parametrize("way", ["local", "tcp"])
def test_a_push_that_waits_for_an_engine_which_hangs(way: str, point: Any) -> None:
    """`asyncio.wait_for` ends it: in time, and the engine goes on, or refuses until it is asked."""
    engine = engine_named()
    with WAYS[way](engine) as reached, WeightSync(WEIGHTS["a"], [reached], timeout=2.0) as sync:
        engine.inject(point, "hang")
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(sync.apush("a"), 0.3))
        assert time.monotonic() - started < 15  # an engine that answers nothing: timeout and a second
        with suppress(EngineDirty):
            assert in_a_thread(lambda: serves(engine))
        if way == "local" or point not in ("pause", "label", "resume"):  # over there it hangs still
            sync.push("b")
            assert engine.version == "b"


def test_ctrl_c_ends_a_push_and_no_engine_is_left_paused() -> None:
    """As it is: a signal in the main thread, within `push`."""
    engine = engine_named()
    engine.inject("commit", "hang")
    with WeightSync(WEIGHTS["a"], [engine], timeout=30) as sync:

        def interrupt() -> None:
            while not engine.paused:
                time.sleep(0.005)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            sync.push("a")
        thread.join(20)
        assert serves(engine) == ("start", None)
        sync.push("a")
        assert serves(engine) == ("a", "a")


def test_an_engine_that_was_condemned_stays_so_until_a_push_has_healed_it() -> None:
    """... at whichever point that push is cancelled."""
    for at in itertools.count(1, 2):
        engine = Waiting(WEIGHTS["start"])
        with WeightSync(dict(WEIGHTS["a"]), [engine], timeout=20) as sync:
            engine.inject("tensor", tensor=2)
            with pytest.raises(ApplyError):
                sync.push("torn")
            interrupts = Interrupts(at, "cancel")
            with suppress(asyncio.CancelledError):
                interrupts.run(lambda sync=sync: sync.apush("a"))
            try:
                found = in_a_thread(lambda engine=engine: serves(engine))
            except EngineDirty:
                pass
            else:
                assert found == ("a", "a")
            sync.push("healed")
            assert serves(engine) == ("a", "healed")
        if not interrupts.done:
            break
