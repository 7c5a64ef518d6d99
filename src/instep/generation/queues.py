"""Queues between actors and a trainer, used from an event loop that they must never block. `queue.Queue` and Ray's queues fit alike."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol

PATIENCE = 0.25
"""Seconds of one attempt. A queue that stays empty or full is tried again, so that stopping never waits longer than this."""


class Queue(Protocol):
    """`queue.Queue`, `ray.util.queue.Queue`: they raise `queue.Empty` and `queue.Full`."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None: ...


class Port:
    """One end of a queue. A thread of its own waits for it, so that a queue which is full keeps nothing else waiting."""

    def __init__(self, queue: Queue, name: str) -> None:
        self.queue = queue
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"instep-{name}")
        self._turn = asyncio.Lock()

    async def get(self) -> Any:
        """The next item; None where there is none yet."""
        try:
            return await self._try(self.queue.get)
        except queue.Empty:
            return None

    async def put(self, item: Any) -> None:
        """Waits as long as the queue is full. Items come out in the order in which they were put."""
        async with self._turn:
            while True:
                try:
                    await self._try(self.queue.put, item)
                    return
                except queue.Full:
                    continue

    async def _try(self, attempt: Any, *arguments: Any) -> Any:
        trying = asyncio.get_running_loop().run_in_executor(self._thread, attempt, *arguments, True, PATIENCE)
        try:
            return await asyncio.shield(trying)
        except asyncio.CancelledError:
            await asyncio.wait({trying})  # what is in the queue then was handed over: it must not be given to somebody else too
            if trying.exception() is not None:
                raise
            return trying.result()

    def close(self) -> None:
        self._thread.shutdown(wait=False)


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
