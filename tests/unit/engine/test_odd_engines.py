"""Engines that break their word: wrong answers, stale answers, too few answers, errors of any kind. A push names them and nothing hangs.

Invariant 7: the caller checks sequence numbers. Invariant 2: whatever it is, the states are told.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from helpers.named_weights import WEIGHTS, Trainer, serves

from instep import MemoryEngine
from instep.engine import CachePolicy
from instep.errors import EngineDirty, EngineLost, InstepError, SyncError, VersionConflict
from instep.protocol import Fault, Method, Reply, Request, decode, encode, raw

pytestmark = pytest.mark.usefixtures("segments")


class OddEngine(MemoryEngine):
    """`twist` changes the replies to `method`, once; or raises."""

    method: str = ""
    twist: Callable[[list[bytes]], list[bytes]] | None = None

    after_pause: Callable[[], object] = staticmethod(lambda: None)

    async def pause(self, caches: CachePolicy) -> None:
        await super().pause(caches)
        self.after_pause()

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        replies = await super().call(method, payload)
        if method == self.method and self.twist is not None:
            twist, self.twist = self.twist, None
            replies = twist(replies)
        return replies


def changed(**fields: Any) -> Callable[[list[bytes]], list[bytes]]:
    """The last worker's reply with other fields."""
    return lambda replies: [*replies[:-1], encode(msgspec.structs.replace(decode(replies[-1], Reply), **fields))]


def raises(error: Exception) -> Callable[[list[bytes]], list[bytes]]:
    def twist(replies: list[bytes]) -> list[bytes]:
        raise error

    return twist


STALE = changed(seq=-7)
TWISTS: dict[str, tuple[Callable[[list[bytes]], Any], str]] = {
    "no list of replies": (lambda replies: None, "sent no valid reply to"),
    "no bytes": (lambda replies: [None for _ in replies], "sent no valid reply to"),
    "no reply": (lambda replies: [], "out of step"),
    "a reply to an earlier request": (STALE, "out of step: its workers lost count of its requests"),
    "garbage": (lambda replies: [b"\xc1garbage"], "sent no valid reply to"),
    "no text": (lambda replies: [replies[0].replace(b"serving", b"serv\xffng")], "sent no valid reply to"),
    "a body of another shape": (changed(body=raw("?")), "sent no valid reply to"),
    "an error of its own": (raises(ConnectionResetError("gone")), "failed in"),
    "an error without text": (raises(AssertionError()), "AssertionError"),
}


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("method", ["hello", "trace", "prepare", "ready", "commit"])
@pytest.mark.parametrize(("twist", "text"), TWISTS.values(), ids=TWISTS)
def test_an_engine_that_answers_wrongly_is_lost(twist: Callable[[list[bytes]], Any], text: str, method: str) -> None:
    engine = OddEngine(WEIGHTS["start"], tp=2)
    trainer = Trainer(engine)
    engine.method, engine.twist = method, twist
    with pytest.raises(EngineLost, match=text) as caught:
        trainer.push("a")
    assert [state.serving for state in caught.value.engines] == ["unknown"]
    if method == "commit":
        with pytest.raises(EngineDirty):
            engine.generate([1], max_tokens=1)
    assert trainer.sync.status()[0].serving == "old"
    assert trainer.push("b").failed == ()
    assert engine.fingerprint() == MemoryEngine(WEIGHTS["b"], tp=2).fingerprint()
    assert engine.generate([1], max_tokens=1)


def test_a_worker_that_does_not_answer_is_missed() -> None:
    engine = OddEngine(WEIGHTS["start"], tp=2)
    engine.method, engine.twist = "hello", lambda replies: replies[:1]
    with pytest.raises(EngineLost, match="memory has 2 workers, 1 answered"):
        Trainer(engine).push("a")


def test_replies_in_any_order_are_told_apart_by_rank() -> None:
    engine = OddEngine(WEIGHTS["start"], tp=2)
    trainer = Trainer(engine)
    engine.method, engine.twist = "trace", lambda replies: replies[::-1]
    trainer.push("a")
    assert engine.fingerprint() == MemoryEngine(WEIGHTS["a"], tp=2).fingerprint()


@pytest.mark.parametrize("attribute", ["pause", "label", "resume", "refuse"])
def test_what_an_engines_own_methods_raise_is_told(attribute: str) -> None:
    engine = MemoryEngine(WEIGHTS["start"])
    trainer = Trainer(engine)

    async def broken(*_: Any) -> None:
        delattr(engine, attribute)
        raise RuntimeError("scheduler is gone")

    setattr(engine, attribute, broken)
    with pytest.raises(EngineLost, match=r"memory failed in (pause|label|resume): RuntimeError: scheduler is gone"):
        trainer.push("a")
    trainer.push("b")
    assert serves(engine) == ("b", "b")


def test_workers_of_two_versions_are_one_dirty_engine() -> None:
    """One worker had lost its preparation: the other has committed, together they are a mixture."""
    engine = OddEngine(WEIGHTS["start"], tp=2)
    trainer = Trainer(engine)

    engine.after_pause = lambda: engine.receivers[1].handle("abort", encode(Request(0, trainer.sync._session.fleet.session)))
    with pytest.raises(SyncError, match=r"memory rank 1: version 'a' is not prepared here") as caught:
        trainer.push("a")
    assert not isinstance(caught.value, VersionConflict)  # that would say that engines serve what they served
    assert [state.serving for state in caught.value.engines] == ["dirty"]
    with pytest.raises(EngineDirty):
        engine.generate([1], max_tokens=1)
    assert trainer.sync.status()[0].serving == "dirty"
    engine.after_pause = lambda: None
    trainer.push("b")
    assert engine.fingerprint() == MemoryEngine(WEIGHTS["b"], tp=2).fingerprint()


def test_an_engine_that_has_lost_its_preparation_goes_on_with_the_old_weights() -> None:
    engine, other = OddEngine(WEIGHTS["start"], name="odd"), MemoryEngine(WEIGHTS["start"], name="other")
    trainer = Trainer(engine, other)

    engine.after_pause = lambda: engine.receivers[0].handle("abort", encode(Request(0, trainer.sync._session.fleet.session)))
    with pytest.raises(SyncError, match="odd: version 'a' is not prepared here") as caught:
        trainer.push("a")
    assert {state.engine: state.serving for state in caught.value.engines} == {"odd": "old", "other": "new"}
    engine.after_pause = lambda: None
    assert (serves(engine), serves(other)) == (("start", None), ("a", "a"))
    assert [engine.engine for engine in trainer.sync.catch_up().engines] == ["odd"]
    assert serves(engine) == ("a", "a")


def test_a_fault_of_a_kind_that_is_not_known_here() -> None:
    """A newer worker may name errors that this trainer has not."""
    engine = OddEngine(WEIGHTS["start"])
    engine.method, engine.twist = "prepare", changed(fault=Fault("QuantumError", "the cat is dead", "w"))
    with pytest.raises(InstepError, match="memory: the cat is dead") as caught:
        Trainer(engine).push("a")
    assert caught.value.tensor == "w"


def test_an_engine_whose_plan_does_not_fit_is_told_from_the_others() -> None:
    """With `require="any"` the receipt says why it was left out, and it is not asked any further."""
    fits, other = MemoryEngine(WEIGHTS["start"], name="fits"), MemoryEngine({"w": WEIGHTS["start"]["model.norm.weight"]}, name="other")
    receipt = Trainer(fits, other, require="any").push("a")
    assert [engine.engine for engine in receipt.engines] == ["fits"]
    assert [state.engine for state in receipt.failed] == ["other"]
    assert "no module or parameter named" in (receipt.failed[0].reason or "")
    assert "prepare" not in other.calls


def test_a_call_that_hangs_is_kept_although_nothing_refers_to_it() -> None:
    """asyncio keeps no task alive: a collected one is told of as destroyed."""
    told: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        engine = MemoryEngine({"weight": torch.zeros(2)})
        engine.inject("pause", "hang")
        asyncio.get_running_loop().create_task(engine.pause("keep"))
        del engine
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(main())
    assert told == []
