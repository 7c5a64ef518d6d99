"""Runs a coroutine to its end, whatever happens to the task that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(action: Callable[[], Coroutine[Any, Any, T]], times: int = 1) -> T:
    """Returns or raises what `action()` does. If the caller is cancelled meanwhile, the action
    still goes on, and the cancellation is raised afterwards. The action must end by itself.

    times: how often it may be begun. An event loop that ends cancels all tasks, once, that of the
    action too.
    """
    cancelled: asyncio.CancelledError | None = None
    for _ in range(times):
        task = asyncio.ensure_future(action())
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if not task.cancelled():
            break
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
