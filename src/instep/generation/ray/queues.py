"""Queues between a trainer and a fleet of Ray actors that lose no prompt: the prompts of an
actor that died go to others.

`engines.py` shows their use. `ray.util.queue.Queue` fits in the same places, and forgets what it
hands over.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable
from typing import Any, TypeVar

from instep.errors import InstepError
from instep.extras import needed_by
from instep.generation.actor.work import BEAT
from instep.generation.exchange.foreign import read
from instep.generation.exchange.ledger import Ledger, LedgerSizes
from instep.generation.ray.metrics import QueueMetrics
from instep.generation.types import GenerationResult, PromptRequest, Split

with needed_by("a fleet of actors"):
    import ray

T = TypeVar("T")


class RolloutQueues:
    """Queues of a fleet on Ray. Each prompt that was put comes out as one result, even if its
    actor dies.

    max_prompts, max_results: how many may wait, 0 for no limit. While results are full, actors take
        no prompts. Results of the evaluation have no limit.
    """

    def __init__(self, max_prompts: int = 0, max_results: int = 0) -> None:
        self.ledger: Any = ray.remote(num_cpus=0)(RayLedger).remote(max_prompts, max_results)
        self.prompts = PromptQueue(self.ledger)
        self.results = ResultQueue(self.ledger, "train")
        self.eval_results = ResultQueue(self.ledger, "eval")

    def sizes(self) -> LedgerSizes:
        sizes: LedgerSizes = _answer(self.ledger.sizes.remote())
        return sizes


class RayLedger(Ledger):
    """The ledger in a Ray actor, which watches the actors that have prompts."""

    def __init__(self, max_prompts: int, max_results: int) -> None:
        super().__init__(max_prompts, max_results)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._told = QueueMetrics()
        self._telling: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"RolloutQueues({len(self.waiting)} prompts, {len(self.results['train'])} results)"

    async def take_for(self, taker: str, handle: Any, within: float | None) -> PromptRequest | None:
        """Takes the next prompt. handle: of the taker's Ray actor, or None. An actor without
        `until_over` is not watched."""
        self._telling = self._telling or asyncio.ensure_future(self._tell())
        request = await self.take(taker, within)
        if request is not None and hasattr(handle, "until_over") and taker not in self._watches:
            self._watches[taker] = asyncio.ensure_future(self._watch(taker, handle))
        return request

    async def _tell(self) -> None:
        while True:
            self._told(await self.sizes())
            await asyncio.sleep(BEAT)

    async def _watch(self, taker: str, handle: Any) -> None:
        try:
            await handle.until_over.remote(taker)
        except ray.exceptions.RayError:
            pass  # it has died, or cannot be reached: what it still hands over counts, if it comes first
        finally:
            del self._watches[taker]
        await self.lost(taker)


class PromptQueue:
    """The queue of prompts: the trainer puts, actors get."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts a prompt. Raises `queue.Full` if there is no room within `timeout` seconds,
        `ConfigError` for a prompt that is on its way already."""
        if not _answer(self._ledger.put.remote(read(item), timeout if block else 0.0)):
            raise queue.Full

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if not await _answered(self._ledger.put.remote(read(item), timeout if block else 0.0)):
            raise queue.Full

    def get(self, block: bool = True, timeout: float | None = None) -> PromptRequest:
        """Returns the next prompt, which belongs to the caller until its result is handed over.
        Raises `queue.Empty` if there is none within `timeout` seconds."""
        found: PromptRequest | None = _answer(self._ledger.take_for.remote(*_me(), timeout if block else 0.0))
        return _there(found)

    async def get_async(self, block: bool = True, timeout: float | None = None) -> PromptRequest:  # noqa: ASYNC109
        found: PromptRequest | None = await _answered(self._ledger.take_for.remote(*_me(), timeout if block else 0.0))
        return _there(found)


class ResultQueue:
    """A queue of results: actors put, the trainer gets."""

    def __init__(self, ledger: Any, split: Split) -> None:
        self._ledger, self._split = ledger, split

    def put(self, item: GenerationResult, block: bool = True, timeout: float | None = None) -> None:
        """Puts a result. Raises `queue.Full` if there is no room within `timeout` seconds. A
        second result of a prompt is dropped."""
        if not _answer(self._ledger.hand_over.remote(item, timeout if block else 0.0)):
            raise queue.Full

    async def put_async(self, item: GenerationResult, block: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if not await _answered(self._ledger.hand_over.remote(item, timeout if block else 0.0)):
            raise queue.Full

    def get(self, block: bool = True, timeout: float | None = None) -> GenerationResult:
        """Returns the next result. Raises `queue.Empty` if there is none within `timeout`
        seconds, `GenerationError` if a prompt was given up."""
        found: GenerationResult | None = _answer(self._ledger.get.remote(self._split, timeout if block else 0.0))
        return _there(found)

    async def get_async(self, block: bool = True, timeout: float | None = None) -> GenerationResult:  # noqa: ASYNC109
        found: GenerationResult | None = await _answered(self._ledger.get.remote(self._split, timeout if block else 0.0))
        return _there(found)


def _me() -> tuple[str, Any]:
    """Returns the id of this worker process, and the handle of its actor or None."""
    context = ray.get_runtime_context()
    return context.get_worker_id(), context.current_actor if context.get_actor_id() else None


def _there(item: T | None) -> T:
    if item is None:
        raise queue.Empty
    return item


def _answer(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise _own(error) from error


async def _answered(reference: Awaitable[Any]) -> Any:
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise _own(error) from error


def _own(error: Any) -> Exception:
    """Returns the ledger's own error if it is one of instep's, else Ray's."""
    return error.cause if isinstance(error.cause, InstepError) else error
