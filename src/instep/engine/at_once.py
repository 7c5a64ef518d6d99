"""A whole commit in one request, for engines that can run it in their own process: an engine is paused no longer than it takes there.

pause(caches) ── call("commit") ── every worker has proved what it took? ── yes ── label(version), resume()
                                                                         └─ no: it stays paused, the trainer decides
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from instep.engine import CachePolicy
from instep.protocol import Reply, WorkerReceipt, decode


@runtime_checkable
class AtOnce(Protocol):
    """What an `Engine` may have beside its methods."""

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        """The workers' replies to "commit"; `went_on` tells what became of it. None, and nothing done, where the engine cannot do that.

        Raises as `Engine.call` does.
        """


def went_on(receipts: Iterable[WorkerReceipt]) -> bool:
    """Whether an engine whose workers answered a commit so was labelled and resumed."""
    return all(receipt.proved for receipt in receipts)


def goes_on(answers: Iterable[bytes]) -> bool:
    """Whether an engine whose workers answer a commit so is to be labelled and resumed. answers: encoded replies."""
    replies = [decode(answer, Reply) for answer in answers]
    return not any(reply.fault for reply in replies) and went_on(decode(reply.body, WorkerReceipt) for reply in replies)
