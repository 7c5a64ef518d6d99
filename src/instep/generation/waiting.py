"""Waiting that ends: at a deadline, or when a sample is aborted. What is no longer waited for is cancelled and left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def bounded(call: Coroutine[Any, Any, T], within: float) -> T:
    """Its result. Raises `TimeoutError` after `within` seconds, also where it ignores that it is cancelled, and for no other reason."""
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=within)
        if not done:
            raise TimeoutError
        return _result(task)
    finally:
        abandon(task)


def _result(task: asyncio.Future[T]) -> T:
    """Of a task that is done. What it raised to end a wait of its own must not be taken for the end of ours."""
    if task.cancelled():
        raise RuntimeError("it was cancelled, though nobody who waits for it was")
    error = task.exception()
    if isinstance(error, TimeoutError):
        raise RuntimeError(f"TimeoutError: {error}" if str(error) else "TimeoutError") from error
    return task.result()


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancels a task that is not done, and does not wait for it: it may take its time. Nobody is told what it raises."""
    if not task.done():
        task.cancel()
        task.add_done_callback(lambda task: task.cancelled() or task.exception())


class Interrupt:
    """Ends what a sample waits for: when `aborted` is set, and `timeout` seconds from now."""

    def __init__(self, aborted: asyncio.Event | None, timeout: float) -> None:
        self.aborted = aborted or asyncio.Event()
        self.deadline = asyncio.get_running_loop().time() + timeout

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    def is_set(self) -> bool:
        return self.aborted.is_set() or self.left == 0

    async def before(self, task: asyncio.Future[Any]) -> bool:
        """Waits until the task is done, which gives True, or until it is interrupted."""
        waiting = asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait({task, waiting}, timeout=self.left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return task.done()
