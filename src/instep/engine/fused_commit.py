"""A whole commit in one request, for engines that can run it in their own process: an engine is
paused no longer than it takes there.

call("reserve"), pause(caches) ── call("commit") ── each worker has proved what it took?
   ├─ yes ─────────────────────────────────────────── label(version), resume(), call("abort")
   ├─ no, but they have together: call("accept") ──── the same
   ├─ no, and they serve what they served ─────────── resume()
   └─ no: it stays paused, the trainer decides
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from msgspec import structs

from instep.engine import CachePolicy, Engine
from instep.plan import sums
from instep.plan.sums import Told
from instep.protocol import Reply, Request, WorkerReceipt, decode, encode, raw


@runtime_checkable
class FusedCommit(Protocol):
    """An optional method of an `Engine`."""

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        """Returns the workers' replies to "commit"; `goes_on` tells how it ended. Returns None,
        with nothing done, if the engine cannot commit at once.

        Raises as `Engine.call` does.
        """


def fused(engine: Engine) -> FusedCommit | None:
    """Returns the engine itself if it has the method. An `isinstance` check with a protocol
    would slow down each commit."""
    return cast(FusedCommit, engine) if hasattr(engine, "commit_at_once") else None


async def step_by_step(engine: Engine, payload: bytes, caches: CachePolicy, version: str) -> list[bytes]:
    """Does the steps of `commit_at_once` one by one: for code close to the engine, on behalf of
    a caller farther away."""
    answers = await engine.call("reserve", beside(payload, version))
    if refused(answers):
        return answers
    await engine.pause(caches)
    answers = await engine.call("commit", payload)
    if proved_together(answers):
        answers = accepted(answers, await engine.call("accept", beside(payload, version)))
    if goes_on(answers):
        await engine.label(version)
        await engine.resume()
        await engine.call("abort", beside(payload))
    elif unchanged(answers):
        await engine.resume()
    return answers


def goes_on(answers: Sequence[bytes]) -> bool:
    """Whether these replies to a commit let the engine be labelled and resumed.

    answers: encoded replies.
    """
    return _all(decode(answer, Reply) for answer in answers)


def unchanged(answers: Sequence[bytes]) -> bool:
    """Whether workers have refused a commit and serve one version. The engine can then go on
    without a decision of the trainer, which may have gone."""
    replies = [decode(answer, Reply) for answer in answers]
    one = len({reply.version for reply in replies}) == 1
    return one and all(reply.fault and reply.state == "serving" for reply in replies)


def beside(payload: bytes, body: Any = None) -> bytes:
    """Encodes another request of the trainer that asks for this commit."""
    return encode(structs.replace(decode(payload, Request), body=raw(body)))


def refused(answers: Iterable[bytes]) -> bool:
    """Whether a worker has answered with a fault."""
    return any(decode(answer, Reply).fault for answer in answers)


def accepted(answers: Sequence[bytes], then: Sequence[bytes]) -> list[bytes]:
    """Returns the replies to a commit, updated by what the workers serve after "accept"."""
    found = []
    for reply, now in zip(*([decode(data, Reply) for data in some] for some in (answers, then)), strict=True):
        found.append(encode(structs.replace(reply, state=now.state, version=now.version, fault=now.fault)))
    return found


def proved_together(answers: Sequence[bytes]) -> bool:
    """Whether the workers have proved together what they took, though not each of them alone."""
    replies = [decode(answer, Reply) for answer in answers]
    if _all(replies) or any(reply.fault or reply.state == "dirty" for reply in replies):
        return False
    return add_up([decode(reply.body, WorkerReceipt) for reply in replies])


def _all(replies: Iterable[Reply]) -> bool:
    return all(reply.fault is None and reply.state == "serving" for reply in replies)


def add_up(receipts: Sequence[WorkerReceipt]) -> bool:
    """Whether the workers' sums add up to those of the trainer's GPU, which must be the same for
    all of them."""
    theirs = receipts[0].theirs
    same = all(receipt.theirs == theirs for receipt in receipts)
    return same and sums.add_up([Told(receipt.wholes, receipt.parts) for receipt in receipts], theirs)
