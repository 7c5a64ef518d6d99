"""Failures at each step of an update by the drop-in for TorchRL, of an engine behind TCP: bounded, told, and healed by the next one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from helpers.dropin_pairs import LATER, NEW, OLD, holds, pair

from instep import MemoryEngine
from instep.errors import EngineTimeout, InstepError, SyncError

pytestmark = [pytest.mark.usefixtures("segments"), pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")]


@pytest.mark.parametrize(
    ("point", "kind", "then"),
    [
        *((point, "error", "old") for point in ("hello", "trace", "prepare", "pause")),
        *((point, "hang", "old") for point in ("hello", "trace", "prepare", "pause")),
        ("commit", "hang", "old"),
        ("label", "hang", "new"),
        ("resume", "hang", "new"),
        ("digest", "error", "old"),
        ("tensor", "error", "dirty"),
    ],
)
def test_a_failure_at_each_step_is_bounded_told_and_healed_by_the_next_update(point: Any, kind: Any, then: str) -> None:
    """Of an engine behind TCP. An engine that hangs is behind a request that never ends: the trainer's deadline ends the wait."""
    engine = MemoryEngine(OLD)
    with pair(NEW, [engine], timeout=3.0 if kind == "hang" else 20.0) as (sender, (receiver,)):
        engine.inject(point, kind)
        started = time.monotonic()
        with pytest.raises(SyncError) as caught:
            sender.update_weights()
        assert time.monotonic() - started < 20
        (state,) = caught.value.engines
        assert isinstance(caught.value, EngineTimeout) or kind == "error"
        assert state.serving in {"old": ("old", "unknown"), "new": ("unknown",), "dirty": ("dirty",)}[then]
        if then == "dirty":
            with pytest.raises(InstepError, match="refuses to generate"):
                engine.generate([1], 1)
        else:
            assert holds(engine) == then
        sender.update_weights(LATER)
        assert holds(engine) == "later"
        assert engine.generate([1], 1)
        assert receiver.poll_and_apply()


def test_a_trainer_that_dies_with_the_engine_paused_leaves_it_running() -> None:
    class Witness(MemoryEngine):
        async def pause(self, caches: Any) -> None:
            await super().pause(caches)
            assert sender._listener is not None
            await asyncio.to_thread(sender._listener.close)  # as the system does with the connections of a process that was killed

    engine = Witness(OLD)
    with pair(NEW, [engine]) as (sender, _):
        with pytest.raises(SyncError):
            sender.update_weights()
        deadline = time.monotonic() + 20
        while engine.paused and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (engine.paused, engine.refusal, holds(engine)) == (False, None, "old")
