"""Waits with a deadline: a transfer that hangs costs the benchmark one row and not the run."""

from __future__ import annotations

import faulthandler
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
DEADLINE = 60.0
"""Seconds for one step: setting a way up, one push, one look at the engine."""


class Late(Exception):
    """A step did not end. What it waits for is in an unknown state."""


def _settle(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def beside(call: Callable[[], T]) -> Future[T]:
    """Runs a call in a thread of its own: one end of a transfer that waits for the other."""
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(call, future), name="instep-bench-end", daemon=True).start()
    return future


class _Thread:
    """Runs calls one after the other in a daemon thread."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="instep-bench", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self.jobs.put((call, future))
        return future

    def _work(self) -> None:
        while True:
            _settle(*self.jobs.get())


_steps: list[_Thread] = []
"""The thread of `bounded`: the same for all steps, as each thread that computes gets threads of its
own from OpenMP."""


def bounded(what: str, call: Callable[[], T], seconds: float = DEADLINE) -> T:
    """Returns or raises what `call` does. Raises `Late` if it has not ended after `seconds`, and
    leaves it behind."""
    if not _steps:
        _steps.append(_Thread())
    future = _steps[0].submit(call)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise
        _steps.clear()
        faulthandler.dump_traceback()  # where it waits
        raise Late(f"{what} did not end within {seconds:g} s") from None
