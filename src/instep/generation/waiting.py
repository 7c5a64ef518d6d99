"""Waiting that ends: at a deadline, or when a sample is aborted. What is no longer waited for is
cancelled and left behind."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from instep.generation.text import told

T = TypeVar("T")


async def bounded(call: Coroutine[Any, Any, T], within: float) -> T:
    """Returns the call's result. Raises `TimeoutError` after `within` seconds, even if the call
    ignores its cancellation, and for no other reason."""
    task = asyncio.ensure_future(contained(call))
    try:
        done, _ = await asyncio.wait({task}, timeout=within)
        if not done:
            raise TimeoutError
        return _result(task)
    finally:
        abandon(task)


async def contained(call: Coroutine[Any, Any, T]) -> T:
    """Returns the call's result. An exception that would end the event loop, such as
    `SystemExit`, is raised as a `RuntimeError`."""
    try:
        return await call
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        if is_for_us(error):
            raise
        raise RuntimeError(told(error)) from error


def is_for_us(error: BaseException) -> bool:
    """Whether an error ends the running task or this process, and not only what the task called."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _result(task: asyncio.Future[T]) -> T:
    """Returns the result of a task that is done. Its own `TimeoutError` or cancellation is
    raised as a `RuntimeError`: the caller would take it for its own."""
    if task.cancelled():
        raise RuntimeError("it was cancelled, though nobody who waits for it was")
    error = task.exception()
    if isinstance(error, TimeoutError):
        raise RuntimeError(f"TimeoutError: {error}" if str(error) else "TimeoutError") from error
    return task.result()


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancels a task that is not done, and does not wait for its end. Its exception is dropped."""
    if not task.done():
        task.cancel()
        task.add_done_callback(lambda task: task.cancelled() or task.exception())


async def unless(stop: asyncio.Event, waiting: Coroutine[Any, Any, Any]) -> bool:
    """Waits for a coroutine, but no longer than until `stop` is set. Returns False if `stop` is
    set."""
    task, stopping = asyncio.ensure_future(waiting), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        stopping.cancel()
    return not stop.is_set()


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
        """Waits until the task is done or the wait is interrupted. Returns whether the task is
        done."""
        waiting = asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait({task, waiting}, timeout=self.left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return task.done()


@asynccontextmanager
async def held(manager: AbstractAsyncContextManager[T], within: float) -> AsyncIterator[T]:
    """Enters and leaves a context manager in a task of its own, which is left behind if either
    takes longer than `within` seconds.

    Raises `TimeoutError` then, also where it ignores that it is cancelled.
    """
    entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def hold() -> None:
        async with manager as value:
            entered.set_result(value)
            await over.wait()

    task = asyncio.ensure_future(contained(hold()))
    either: set[asyncio.Future[Any]] = {task, entered}
    try:
        await asyncio.wait(either, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            _result(task)
        if not entered.done():
            raise TimeoutError
    except BaseException:
        abandon(task)
        raise
    try:
        yield entered.result()
    finally:
        over.set()
        await asyncio.wait({task}, timeout=within)
        if not task.done():
            abandon(task)
            raise TimeoutError
        _result(task)


class Turnstile:
    """Lets `at_once` callers through at a time, in the order in which they came. They may be on
    different event loops."""

    def __init__(self, at_once: int) -> None:
        self.at_once = self._free = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.at_once,)

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            with self._lock:
                if future in self._waiting:
                    self._waiting.remove(future)
            if not future.cancelled():  # its turn had come
                self._next()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._next()

    def _next(self) -> None:
        with self._lock:
            while self._waiting:
                future = self._waiting.popleft()
                try:
                    future.get_loop().call_soon_threadsafe(self._let, future)
                except RuntimeError:  # its loop has ended
                    continue
                return
            self._free += 1

    def _let(self, future: asyncio.Future[None]) -> None:
        if future.done():  # it was cancelled
            self._next()
        else:
            future.set_result(None)
