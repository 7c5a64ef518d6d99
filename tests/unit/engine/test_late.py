"""Commits that end otherwise than their trainer saw: after the deadline, overtaken by other calls, or cancelled."""

from __future__ import annotations

import asyncio

import pytest
from helpers.hanging import hang
from helpers.named_weights import WEIGHTS, Trainer, engine_named, serves

from instep import MemoryEngine
from instep.errors import EngineDirty, EngineTimeout, VersionConflict
from instep.protocol import Method

pytestmark = pytest.mark.usefixtures("segments")
at_once = pytest.mark.usefixtures("deadlines")


class LateEngine(MemoryEngine):
    """Its next commit works, and answers long after the deadline."""

    late = False

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        replies = await super().call(method, payload)
        if method == "commit" and self.late:
            self.late = False
            await hang()
        return replies


def late_push() -> tuple[LateEngine, Trainer]:
    engine = LateEngine(WEIGHTS["start"])
    trainer = Trainer(engine)
    trainer.push("a")
    engine.late = True
    with pytest.raises(EngineTimeout, match="memory did not answer commit within 60 s") as caught:
        trainer.push("b")
    assert caught.value.engines[0].serving == "unknown"
    with pytest.raises(EngineDirty, match="it is not known which weights are in place"):
        engine.generate([1], max_tokens=1)
    return engine, trainer


@at_once
def test_a_commit_that_works_after_its_deadline_is_recognised() -> None:
    engine, trainer = late_push()
    assert [(state.serving, state.version) for state in trainer.sync.status()] == [("old", "b")]
    assert serves(engine) == ("b", "b")
    trainer.push("c", base="b")
    assert serves(engine) == ("c", "c")


@at_once
def test_a_push_may_follow_a_late_commit_at_once() -> None:
    engine, trainer = late_push()
    trainer.push("c")
    assert serves(engine) == ("c", "c")


@at_once
def test_a_late_version_may_be_pushed_again_with_its_own_bytes_only() -> None:
    engine, trainer = late_push()
    with pytest.raises(VersionConflict, match="served before, with other bytes"):
        trainer.push("b", "c")
    assert serves(engine) == ("b", "b")
    trainer.push("b")
    assert serves(engine) == ("b", "b")


class OvertakenEngine(MemoryEngine):
    """Its next commit is left behind by calls that come after it, and runs when `catch` is called."""

    overtaken: bytes | None = None
    waits = False

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        if method == "commit" and self.waits:
            self.waits, self.overtaken = False, payload
            await hang()
        return await super().call(method, payload)

    def catch(self) -> None:
        for receiver in self.receivers:
            receiver.handle("commit", self.overtaken or b"")


@at_once
def test_a_commit_that_was_overtaken_finds_nothing_to_commit() -> None:
    """Invariant 1: it must not land while the engine generates again."""
    engine = OvertakenEngine(WEIGHTS["start"])
    trainer = Trainer(engine)
    trainer.push("a")
    engine.waits = True
    with pytest.raises(EngineTimeout):
        trainer.push("b")
    assert trainer.sync.status()[0].version == "a"
    assert serves(engine) == ("a", "a")
    engine.catch()
    assert serves(engine) == ("a", "a")


def test_a_push_that_is_cancelled_leaves_no_engine_paused() -> None:
    """As Ctrl-C does: the next call finds out what was done."""
    engine = engine_named()
    trainer = Trainer(engine)
    trainer.push("a")
    engine.inject("commit", "hang")
    trainer.source.update(WEIGHTS["b"])

    async def main() -> None:
        push = asyncio.create_task(trainer.sync.apush("b"))
        while not engine.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push

    asyncio.run(main())
    assert trainer.sync.status()[0].version == "a"
    assert serves(engine) == ("a", "a")
    trainer.push("b")
    assert serves(engine) == ("b", "b")
