"""Keeps which actor has which prompt, so that each prompt comes out as one result even if actors
die.

    put ──▶ waiting ──take──▶ taken ──hand_over──▶ results ──get──▶
               ▲                │
               └──────lost──────┘

`queue.Queue` forgets an item when it hands it over; what an actor had taken is gone with it. Used
on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from msgspec import Struct

from instep.errors import ConfigError, GenerationError
from instep.generation.types import GenerationResult, PromptId, PromptRequest, Split

ATTEMPTS = 3
"""Actors that a prompt may be given to. One that was with so many when they died is what kills
them."""


class LedgerSizes(Struct, frozen=True):
    """Sizes of a ledger. waiting: prompts for an actor. taken: prompts with an actor. results,
    eval_results: for the trainer. reissued: prompts taken back so far."""

    waiting: int
    taken: int
    results: int
    eval_results: int
    reissued: int


@dataclass
class Entry:
    request: PromptRequest
    taker: str | None = None
    attempts: int = 0


class Ledger:
    """Prompts and results on their way. max_prompts, max_results: how many may wait, 0 for no
    limit. Results of the evaluation have no limit."""

    def __init__(self, max_prompts: int = 0, max_results: int = 0) -> None:
        self.max_prompts, self.max_results = max_prompts, max_results
        self.entries: dict[PromptId, Entry] = {}
        """Prompts without a result."""
        self.waiting: deque[PromptId] = deque()
        self.results: dict[Split, deque[GenerationResult]] = {"train": deque(), "eval": deque()}
        self.reissued = 0
        self.given_up: list[PromptId] = []
        self._changed = asyncio.Condition()

    async def put(self, request: PromptRequest, within: float | None = None) -> bool:
        """Adds a prompt. Returns False if there was no room within so many seconds; with None it
        waits for ever.

        Raises `ConfigError` for a prompt that is on its way already.
        """
        async with self._changed:
            if not await self._until(lambda: not self.max_prompts or len(self.waiting) < self.max_prompts, within):
                return False
            if request.id in self.entries:
                raise ConfigError(f"prompt {request.id} is on its way already: a round of its own tells it from the same prompt later")
            self.entries[request.id] = Entry(request)
            self.waiting.append(request.id)
            self._changed.notify_all()
            return True

    async def take(self, taker: str, within: float | None = None) -> PromptRequest | None:
        """Returns the next prompt, which belongs to `taker` from now on."""
        async with self._changed:
            if not await self._until(lambda: bool(self.waiting), within):
                return None
            entry = self.entries[self.waiting.popleft()]
            entry.taker = taker
            entry.attempts += 1
            self._changed.notify_all()
            return entry.request

    async def hand_over(self, result: GenerationResult, within: float | None = None) -> bool:
        """Adds a result. Only a prompt's first result counts: a taker that was given up may
        still be at work.

        False where there was no room for it within so many seconds.
        """
        id = result.request.id
        waits = self.results[id.split]
        bound = self.max_results if id.split == "train" else 0
        async with self._changed:
            if not await self._until(lambda: id not in self.entries or not bound or len(waits) < bound, within):
                return False
            entry = self.entries.pop(id, None)
            if entry is not None:
                if entry.taker is None:
                    self.waiting.remove(id)
                waits.append(result)
                self._changed.notify_all()
            return True

    async def get(self, split: Split, within: float | None = None) -> GenerationResult | None:
        """Returns the next result.

        Raises `GenerationError` where there is none and a prompt was given up, as its result would
        be waited for in vain.
        """
        waits = self.results[split]
        async with self._changed:
            if not await self._until(lambda: bool(waits or self.given_up), within):
                return None
            if not waits:
                raise GenerationError(
                    f"prompt {self.given_up[0]} was with {ATTEMPTS} actors when they died, one after another",
                    next_step="read the logs of these actors; what it asks of them may be what ends them",
                )
            result = waits.popleft()
            self._changed.notify_all()
            return result

    async def lost(self, taker: str) -> list[PromptId]:
        """Gives this taker's prompts back, before all that wait. Returns their ids."""
        async with self._changed:
            mine = [id for id, entry in self.entries.items() if entry.taker == taker]
            for id in reversed(mine):
                entry = self.entries[id]
                entry.taker = None
                if entry.attempts < ATTEMPTS:
                    self.waiting.appendleft(id)
                    self.reissued += 1
                else:
                    del self.entries[id]
                    self.given_up.append(id)
            self._changed.notify_all()
            return mine

    async def sizes(self) -> LedgerSizes:
        waiting, results, evals = len(self.waiting), len(self.results["train"]), len(self.results["eval"])
        return LedgerSizes(waiting, len(self.entries) - waiting, results, evals, self.reissued)

    async def _until(self, condition: Callable[[], bool], within: float | None) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._changed.wait_for(condition)
        return condition()
