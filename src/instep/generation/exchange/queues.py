"""Uses queues between actors and a trainer from an event loop without blocking that loop.
`queue.Queue` and Ray's queues both fit."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

PATIENCE = 0.25
"""Seconds of one attempt. A queue that stays empty or full is tried again, so that stopping never
waits longer than this."""


class Queue(Protocol):
    """The methods of `queue.Queue` and `ray.util.queue.Queue`. They raise `queue.Empty` and
    `queue.Full`."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None: ...


class Port:
    """One end of a queue. Blocking calls wait in a thread of their own, so that a full queue
    blocks nothing else."""

    def __init__(self, queue: Queue, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"instep-{name}")
        self._get, self._put = self._attempt(queue, "get"), self._attempt(queue, "put")
        self._turn = asyncio.Lock()

    async def get(self) -> Any:
        """Returns the next item, or None if there is none yet."""
        try:
            return await _to_its_end(self._get(True, PATIENCE))
        except queue.Empty:
            return None

    async def put(self, item: Any, unless: Callable[[], bool]) -> bool:
        """Puts an item, and waits as long as the queue is full. Items come out in the order in
        which they were put.

        unless: asked before each attempt; where it says so, the item is not put, and False comes
        back.
        """
        async with self._turn:
            while not unless():
                with suppress(queue.Full):
                    await _to_its_end(self._put(item, True, PATIENCE))
                    return True
            return False

    def _attempt(self, queue: Queue, method: str) -> Callable[..., Awaitable[Any]]:
        """Returns a queue's method as one for asyncio. Ray's queues have such methods, which
        actors with async methods must use."""
        for_asyncio: Callable[..., Awaitable[Any]] | None = getattr(queue, f"{method}_async", None)
        if for_asyncio is not None:
            return for_asyncio
        return lambda *arguments: asyncio.get_running_loop().run_in_executor(self._thread, getattr(queue, method), *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


async def _to_its_end(attempt: Awaitable[Any]) -> Any:
    """Returns the attempt's result, even if the caller is cancelled meanwhile. An item that has
    reached the queue was handed over, and must not go to another too."""
    trying = asyncio.ensure_future(attempt)
    try:
        return await asyncio.shield(trying)
    except asyncio.CancelledError:
        await asyncio.wait({trying})
        if trying.exception() is not None:
            raise
        return trying.result()


class Places:
    """A number of places, given out in the order of the requests."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Holds `count` places while it lasts. A request for more than there are gets all of
        them."""
        count = min(count, self.limit)
        await self.room(count)
        self.used += count
        try:
            yield
        finally:
            self.used -= count
            self._freed.set()

    async def room(self, count: int = 1) -> None:
        """Waits until so many places are free and every earlier request has its places."""
        async with self._turn:
            while self.used + count > self.limit:
                self._freed.clear()
                await self._freed.wait()
