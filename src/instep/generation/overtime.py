"""Runs foreign code that may never end in a thread, and stops that thread when its time is over."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ENDING = 2.0
"""Seconds in which a call that is stopped must end."""


class Overtime(BaseException):
    """Stops the thread in which it is raised. No `except Exception` catches it."""


async def in_time(call: Callable[[], T], seconds: float) -> T:
    """Returns or raises what the call does. Raises `TimeoutError` after `seconds`, when the call
    has ended at its next step in Python.

    A call into C is not stopped before it returns: one that lets other threads work, such as a
    search of `regex`, is left behind after `ENDING` seconds more. One that does not, such as a
    search of `re`, stops this process meanwhile: nothing that reads a model's text may make one
    that takes more than linear time.
    """
    work = _Work(call, asyncio.get_running_loop())
    try:
        await asyncio.wait({work.over}, timeout=seconds)
    finally:
        stopped = work.stop()
    if stopped:
        await asyncio.wait({work.over}, timeout=ENDING)
        work.over.cancel()
        raise TimeoutError
    return await work.over


class _Work(Generic[T]):
    def __init__(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.call, self.loop = call, loop
        self.over: asyncio.Future[T] = loop.create_future()
        self.lock = threading.Lock()
        self.runs = True
        self.thread = threading.Thread(target=self._run, name="instep-in-time", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            try:
                result = self.call()
            except BaseException as raised:
                error = raised
            with self.lock:
                self.runs = False
        except Overtime:  # it came between the end of the call and ours
            self.runs = False
        with suppress(RuntimeError):  # the loop has ended: nobody waits
            self.loop.call_soon_threadsafe(self._tell, result, error)

    def _tell(self, result: Any, error: BaseException | None) -> None:
        if self.over.done():
            return
        if error is None or isinstance(error, Overtime):
            self.over.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.over.set_exception(error)
        else:  # no future takes it, or it would end the loop
            self.over.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def stop(self) -> bool:
        """Stops the call. Returns whether it was still running."""
        with self.lock:
            if self.runs and self.thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(Overtime))
            return self.runs
