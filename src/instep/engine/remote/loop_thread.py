"""An event loop for callers who have none, or whose own loop ends before a connection does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
ENDING = 10.0
"""Seconds."""


class LoopThread:
    """An event loop in a thread of its own: connections on it outlive the callers' loops."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.closing = threading.Lock()
        self.thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self, server: asyncio.Server | None = None) -> None:
        """Cancels all tasks and ends the thread. May be called twice."""
        with self.closing:
            if not self.loop.is_closed():
                self.run(self._end(server)).result(ENDING)
                self.loop.call_soon_threadsafe(self.loop.stop)
                self.thread.join(ENDING)
                self.loop.close()

    async def _end(self, server: asyncio.Server | None) -> None:
        if server is not None:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
