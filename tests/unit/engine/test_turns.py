"""Requests that change what an engine does come while others still run: from a trainer that has
given up on one, or from another trainer. No engine goes on within a commit (invariant 1), and none
is left paused by a pause that was slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from helpers.named_weights import WEIGHTS, serves
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.engine import CachePolicy
from instep.engine.fused_commit import step_by_step, unchanged
from instep.engine.remote.rpc import Endpoint, LocalRpc, Outcome, RemoteEngine
from instep.errors import SyncError
from instep.protocol import CommitRequest, Fault, Method, Reply, Request, decode, encode, raw

pytestmark = pytest.mark.usefixtures("segments")


class Slow(MemoryEngine):
    """Its next commit, or pause, begins when it is told to. `does`: what it did, in order."""

    def __init__(self, slow: str) -> None:
        super().__init__(WEIGHTS["start"])
        self.slow, self.go_on, self.does = slow, asyncio.Event(), list[str]()

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        await self._wait(method)
        found = await super().call(method, payload)
        self.does.append(method)
        return found

    async def pause(self, caches: CachePolicy) -> None:
        await self._wait("pause")
        await super().pause(caches)
        self.does.append("pause")

    async def resume(self) -> None:
        await super().resume()
        self.does.append("resume")

    async def _wait(self, step: str) -> None:
        if step == self.slow:
            self.slow = ""
            await self.go_on.wait()


def in_order(slow: str, requests: Callable[[Endpoint, Slow], Any]) -> Slow:
    """Makes the engine on a loop, and awaits what `requests` does with its endpoint."""

    async def main() -> Slow:
        engine = Slow(slow)
        await requests(Endpoint(engine, timeout=20), engine)
        return engine

    return asyncio.run(main())


def call(method: Method, seq: int, body: Any = None, session: str = "trainer") -> tuple[str, bytes]:
    return "call", encode((method, encode(Request(seq, session, raw(body)))))


PAUSE, RESUME = ("pause", encode(("reset",))), ("resume", encode(()))


def test_a_resume_waits_for_the_commit_of_another_trainer() -> None:
    async def requests(endpoint: Endpoint, engine: Slow) -> None:
        await endpoint.answer(*PAUSE)
        commit = asyncio.create_task(endpoint.answer(*call("commit", 1, CommitRequest("v1"))))
        await asyncio.sleep(0.01)
        resume = asyncio.create_task(endpoint.answer(*RESUME))
        await asyncio.sleep(0.05)
        assert (resume.done(), engine.paused) == (False, True)
        engine.go_on.set()
        await asyncio.gather(commit, resume)

    engine = in_order("commit", requests)
    assert engine.does == ["pause", "commit", "resume"]
    assert not engine.paused


def test_it_waits_for_none_that_its_trainer_has_called_off() -> None:
    """The workers have answered that they take it no more, and the engine need not wait for it."""

    async def requests(endpoint: Endpoint, engine: Slow) -> None:
        await endpoint.answer(*PAUSE)
        commit = asyncio.create_task(endpoint.answer(*call("commit", 1, CommitRequest("v1"))))
        await asyncio.sleep(0.01)
        await endpoint.answer(*call("abort", 2))
        await endpoint.answer(*RESUME)
        assert not engine.paused
        engine.go_on.set()
        (reply,) = decode(decode(await commit, Outcome).body, list[bytes])
        fault = decode(reply, Reply).fault
        assert fault is not None
        assert "its trainer has aborted the push since" in fault.message

    assert in_order("commit", requests).does == ["pause", "abort", "resume", "commit"]


def test_a_pause_that_is_slow_does_not_outlast_the_resume_that_follows_it() -> None:
    async def requests(endpoint: Endpoint, engine: Slow) -> None:
        pause = asyncio.create_task(endpoint.answer(*PAUSE))
        await asyncio.sleep(0.01)
        resume = asyncio.create_task(endpoint.answer(*RESUME))
        await asyncio.sleep(0.01)
        engine.go_on.set()
        await asyncio.gather(pause, resume)

    engine = in_order("pause", requests)
    assert (engine.does, engine.paused) == (["pause", "resume"], False)


def test_a_commit_does_not_begin_after_a_resume() -> None:
    async def requests(endpoint: Endpoint, _: Slow) -> None:
        await endpoint.answer(*PAUSE)
        resume = asyncio.create_task(endpoint.answer(*RESUME))
        commit = asyncio.create_task(endpoint.answer(*call("commit", 1, CommitRequest("v1"))))
        await resume
        fault = decode(await commit, Outcome).fault
        assert fault is not None
        assert "was left paused" in fault.message

    assert in_order("", requests).does == ["pause", "resume"]


@pytest.mark.parametrize("method", ["prepare", "commit", "trace"])
def test_a_request_that_was_overtaken_by_an_abort_changes_nothing(method: Method) -> None:
    engine = MemoryEngine(attention(0))
    (receiver,) = engine.receivers
    receiver.handle("abort", encode(Request(5, "trainer")))
    for seq, session, late in ((4, "trainer", True), (6, "trainer", False), (4, "other", False)):
        reply = decode(receiver.handle(method, encode(Request(seq, session))), Reply)
        assert reply.fault is not None  # of some kind: the request has no body
        assert ("comes late" in reply.fault.message) == late


REFUSED = Fault("VersionConflict", "not prepared")


@pytest.mark.parametrize(
    ("replies", "goes_on"),
    [
        ([Reply(1, 0, "serving", "a", REFUSED)], True),
        ([Reply(1, 0, "serving", "a", REFUSED), Reply(1, 1, "serving", "a", REFUSED)], True),
        ([Reply(1, 0, "serving", "b"), Reply(1, 1, "serving", "a", REFUSED)], False),
        ([Reply(1, 0, "serving", "a"), Reply(1, 1, "serving", "a", REFUSED)], False),
        ([Reply(1, 0, "serving", "b", REFUSED), Reply(1, 1, "serving", "a", REFUSED)], False),
        ([Reply(1, 0, "dirty", "a", REFUSED)], False),
        ([Reply(1, 0, "unproved", "a")], False),
    ],
)
def test_an_engine_goes_on_by_itself_only_where_all_workers_refused_and_serve_one_version(replies: list[Reply], goes_on: bool) -> None:
    assert unchanged([encode(reply) for reply in replies]) == goes_on


def test_a_commit_in_one_call_that_nobody_waits_for_any_more_leaves_no_pause() -> None:
    """As in a Ray actor: the trainer has aborted, asked and resumed, and the call still runs."""
    engine = MemoryEngine(WEIGHTS["start"])

    async def main() -> None:
        late = encode(Request(1, "trainer", raw(CommitRequest("v1"))))
        await engine.call("abort", encode(Request(2, "trainer")))
        await engine.resume()
        await step_by_step(engine, late, "reset", "v1")

    asyncio.run(main())
    assert not engine.paused
    assert engine.generate([1], 1)


def test_a_trainer_that_gives_up_on_a_slow_pause_leaves_the_engine_generating() -> None:
    """Over a connection, where what was asked for goes on though nobody waits for it."""

    async def main() -> Slow:
        engine = Slow("pause")
        reached = RemoteEngine(LocalRpc(Endpoint(engine).answer))

        async def apart(method: str, payload: bytes, rpc: Any = reached.rpc) -> bytes:
            return await asyncio.shield(asyncio.ensure_future(LocalRpc.call(rpc, method, payload)))

        reached.rpc.call = apart  # type: ignore[method-assign]
        with WeightSync(WEIGHTS["a"], [reached], timeout=5) as sync:
            push = asyncio.create_task(sync.apush("v1"))
            while "prepare" not in engine.does:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            push.cancel()
            await asyncio.sleep(0.1)
            engine.go_on.set()
            with pytest.raises((asyncio.CancelledError, SyncError)):
                await push
            assert serves(engine) == ("start", None)
            await sync.apush("v2")
        return engine

    engine = asyncio.run(main())
    assert serves(engine) == ("a", "v2")
