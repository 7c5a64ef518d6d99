"""A whole commit in one request, for engines that can run it in their own process: an engine is paused no longer than it takes there.

pause(caches) ── call("commit") ── the workers have proved what they took? ── yes ── label(version), resume()
                                                                           └─ no: it stays paused, the trainer decides
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from instep.digest import MASK
from instep.engine import CachePolicy, Engine
from instep.protocol import Reply, WorkerReceipt, decode


@runtime_checkable
class AtOnce(Protocol):
    """What an `Engine` may have beside its methods."""

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        """The workers' replies to "commit"; `went_on` tells what became of it. None, and nothing done, where the engine cannot do that.

        Raises as `Engine.call` does.
        """


async def step_by_step(engine: Engine, payload: bytes, caches: CachePolicy, version: str) -> list[bytes]:
    """`commit_at_once` of an engine whose steps cost little, for whoever is farther away."""
    await engine.pause(caches)
    answers = await engine.call("commit", payload)
    if goes_on(answers):
        await engine.label(version)
        await engine.resume()
    return answers


def went_on(receipts: Sequence[WorkerReceipt]) -> bool:
    """Whether an engine whose workers answered a commit so was labelled and resumed."""
    return all(receipt.proved for receipt in receipts) or _proved_together(receipts)


def goes_on(answers: Iterable[bytes]) -> bool:
    """Whether an engine whose workers answer a commit so is to be labelled and resumed. answers: encoded replies."""
    replies = [decode(answer, Reply) for answer in answers]
    return not any(reply.fault for reply in replies) and went_on([decode(reply.body, WorkerReceipt) for reply in replies])


def _proved_together(receipts: Sequence[WorkerReceipt]) -> bool:
    """Whether the parts that workers hold add up to what the trainer's GPU has told, the same for all of them. Sums are keyed by position:
    workers that hold the same part tell the same, and it counts once. A sum of zero would count for nothing, so it proves nothing."""
    theirs = receipts[0].theirs
    if not theirs or any(receipt.theirs != theirs for receipt in receipts):
        return False
    for name, total in theirs.items():
        wholes = {receipt.wholes[name] for receipt in receipts if name in receipt.wholes}
        parts = {receipt.parts[name] for receipt in receipts if name in receipt.parts}
        if not wholes | parts or not wholes <= {total} or (parts and sum(parts) & MASK != total) or (len(parts) > 1 and 0 in parts):
            return False
    return True
