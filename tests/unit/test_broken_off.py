"""A push that is cancelled, interrupted or broken by an error at any point at which it waits: no
engine is left paused, each serves one whole version under its label or refuses, no lease is left,
and the same `WeightSync` pushes on.

Invariants 1 and 2. The points are counted, so that one which is added is tried too.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from helpers.interrupts import Interrupts
from helpers.named_weights import WEIGHTS, serves
from helpers.waiting_engines import WAYS, Waiting, in_a_thread

from instep import MemoryEngine, WeightSync
from instep.engine import memory
from instep.errors import EngineDirty, EngineLost, VersionConflict

pytestmark = pytest.mark.usefixtures("segments")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is left paused is told from one that goes on in a moment."""
    monkeypatch.setattr(memory, "HELD", 5.0)


POINTS = 8
"""The least at which a push waits, where each call over a connection counts as one."""


class Pushed:
    """A trainer and its engine. `later`: the engine is known, from a push of `a`."""

    def __init__(self, reached: Any, engine: MemoryEngine, *, later: bool, **settings: Any) -> None:
        self.engine, self.source, self.later = engine, dict(WEIGHTS["a"]), later
        self.sync = WeightSync(self.source, [reached], timeout=20, **settings)
        if later:
            self.sync.push("a")
        self.source.update(WEIGHTS["b"])

    def check(self, *, failed: bool) -> None:
        """What the engine does now, and that both go on. failed: the engine has, by an error: if
        that was when it was to end the lease, that ends by itself, and if it was in the commit
        nobody knew what came of that."""
        version = self.engine.version
        try:
            found = in_a_thread(lambda: serves(self.engine))
        except EngineDirty:
            pass
        else:
            assert found == (version or "start", version)
            assert version in ((None, "a")[self.later], "b")
        if not failed:
            assert self.engine.receivers[0].lease.session is None
            assert self.engine.receivers[0].prepared is None
        (state,) = self.sync.status()
        assert state.serving in ("old", "new")  # one that refused was asked, and goes on
        assert in_a_thread(lambda: serves(self.engine)) == (state.version or "start", state.version)
        if state.version == "b" and not failed:
            with pytest.raises(VersionConflict, match="'b' was pushed before: it is the current"):
                self.sync.push("b")
            assert self.sync.catch_up().version == "b"
        self.source.update(WEIGHTS["c"])
        self.sync.push("c")
        assert serves(self.engine) == ("c", "c")
        with WeightSync(WEIGHTS["a"], [self.engine]) as another:  # nobody is kept away
            another.push("another")


def every_point(way: str, how: Any, *, later: bool, count: int = 1, tp: int = 1) -> int:
    """Interrupts a push at each of its points in turn. Returns how many there are."""
    at = 0
    while True:
        at += 1
        engine = Waiting(WEIGHTS["start"], tp=tp)
        with WAYS[way](engine) as reached:
            pushed = Pushed(reached, engine, later=later)
            interrupts = Interrupts(at, how, count)
            with suppress(asyncio.CancelledError, KeyboardInterrupt, SystemExit, Broken, EngineLost):
                interrupts.run(lambda sync=pushed.sync: sync.apush("b"))
                assert engine.version == "b"  # it had ended before, or was cancelled in vain
            if tp == 1:
                pushed.check(failed=isinstance(how, Broken))
            pushed.sync.close()
            if not interrupts.done:
                return at - 1


class Broken(Exception):
    """What nobody has foreseen."""


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("way", WAYS)
def test_a_push_that_is_cancelled(way: str, later: bool) -> None:
    assert every_point(way, "cancel", later=later) >= POINTS


@pytest.mark.parametrize("count", [2, 3])
def test_a_push_that_is_cancelled_again_while_it_ends(count: int) -> None:
    assert every_point("local", "cancel", later=True, count=count) >= POINTS


@pytest.mark.parametrize("how", [KeyboardInterrupt(), SystemExit(), Broken()], ids=repr)
@pytest.mark.parametrize("way", ["local", "endpoint"])
def test_a_push_that_is_interrupted(way: str, how: BaseException) -> None:
    assert every_point(way, how, later=True) >= POINTS
