"""Queues between actors and a trainer, used from an event loop that they must never block. `queue.Queue` and Ray's queues fit alike."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

PATIENCE = 0.25
"""Seconds of one attempt. A queue that stays empty or full is tried again, so that stopping never waits longer than this."""


class Queue(Protocol):
    """`queue.Queue`, `ray.util.queue.Queue`: they raise `queue.Empty` and `queue.Full`."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None: ...


class Port:
    """One end of a queue. What would block waits in a thread of its own, so that a queue which is full keeps nothing else waiting."""

    def __init__(self, queue: Queue, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"instep-{name}")
        self._get, self._put = self._attempt(queue, "get"), self._attempt(queue, "put")
        self._turn = asyncio.Lock()

    async def get(self) -> Any:
        """The next item; None where there is none yet."""
        try:
            return await _to_its_end(self._get(True, PATIENCE))
        except queue.Empty:
            return None

    async def put(self, item: Any, unless: Callable[[], bool]) -> bool:
        """Waits as long as the queue is full. Items come out in the order in which they were put.

        unless: asked before each attempt; where it says so, the item is not put, and False comes back.
        """
        async with self._turn:
            while not unless():
                with suppress(queue.Full):
                    await _to_its_end(self._put(item, True, PATIENCE))
                    return True
            return False

    def _attempt(self, queue: Queue, method: str) -> Callable[..., Awaitable[Any]]:
        """Ray's queues have methods for asyncio, and Ray wants them used in an actor of async methods."""
        for_asyncio: Callable[..., Awaitable[Any]] | None = getattr(queue, f"{method}_async", None)
        if for_asyncio is not None:
            return for_asyncio
        return lambda *arguments: asyncio.get_running_loop().run_in_executor(self._thread, getattr(queue, method), *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


async def _to_its_end(attempt: Awaitable[Any]) -> Any:
    """Its result, also where the caller is cancelled: what is in the queue then was handed over, and must not be given to another too."""
    trying = asyncio.ensure_future(attempt)
    try:
        return await asyncio.shield(trying)
    except asyncio.CancelledError:
        await asyncio.wait({trying})
        if trying.exception() is not None:
            raise
        return trying.result()


class Places:
    """A number of places, given out in the order in which they were asked for."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Takes `count` places for a while. Who asks for more than there are gets all of them."""
        count = min(count, self.limit)
        await self.room(count)
        self.used += count
        try:
            yield
        finally:
            self.used -= count
            self._freed.set()

    async def room(self, count: int = 1) -> None:
        """Waits until so many are free, and nobody waits who came before."""
        async with self._turn:
            while self.used + count > self.limit:
                self._freed.clear()
                await self._freed.wait()
