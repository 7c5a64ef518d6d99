"""An event loop in a thread of its own, and tasks on it whose errors are kept until somebody
asks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from instep.errors import GenerationError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Background:
    """Runs coroutines on an event loop in a thread of its own. on_failure: called on that loop,
    once, when `failure` is set."""

    def __init__(self, name: str, on_failure: Callable[[], None]) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self.closed = False
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"instep-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def check(self) -> None:
        """Raises `GenerationError` if a task has failed or the loop has ended."""
        if self.failure is not None:
            raise GenerationError(
                f"{self.name} has failed: {type(self.failure).__name__}: {self.failure}",
                next_step="nothing more comes from this actor: make a new one, and give it the prompts that were not answered",
            ) from self.failure
        if self.closed or not self._thread.is_alive():
            raise GenerationError(f"{self.name} is closed", next_step="make a new actor")

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts a task that nobody waits for. Call this on the loop. An error of the task
        becomes `failure`."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if self.failure is None and not self.closed:
            self.failure = error
            logger.error("%s has failed", self.name, exc_info=error)
            self._on_failure()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedules the coroutine on the loop. May be called from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Returns the coroutine's result. After `timeout` seconds it is cancelled, and
        `TimeoutError` raised."""
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    async def aside(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the coroutine's result to a caller on any event loop."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def close(self, timeout: float) -> None:
        """Cancels what runs, and ends the thread."""
        if self.closed:
            return
        self.closed = True
        with suppress(TimeoutError):
            self.run(self._cancel(), timeout)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)

    async def _cancel(self) -> None:
        """Cancels all tasks, calls from other threads included: once the loop has stopped, their
        callers would get no answer."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
