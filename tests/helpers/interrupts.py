"""Ends a call of asyncio at a point of its choice: counts how often any task gives up control, and
interrupts it there."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Interrupts:
    """at: which of the points at which a task waits, counted from 1, over all tasks. how: `cancel`
    for the task of the call, or what is raised in the task that waits there. count: how often."""

    def __init__(self, at: int, how: Any, count: int = 1) -> None:
        self.at, self.how, self.left = at, how, count
        self.seen = 0
        self.main: asyncio.Task[Any] | None = None

    @property
    def done(self) -> bool:
        return self.seen >= self.at

    def run(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        """As `asyncio.run` does. Raises what came of it."""

        return asyncio.run(self.within(call))

    async def within(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        """The same on a loop that runs already."""
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        loop.set_task_factory(self._task)
        try:
            self.main = loop.create_task(call())
            return await self.main
        finally:
            loop.set_task_factory(before)

    def _task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(self._counted(coroutine), loop=loop, **options)
        task.add_done_callback(lambda _: coroutine.close())  # one that was cancelled before it began
        return task

    @types.coroutine
    def _counted(self, coroutine: Any) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            try:
                waits_for = coroutine.send(value) if error is None else coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            try:
                self._interrupt()
                value = yield waits_for
            except BaseException as raised:
                error = raised

    def _interrupt(self) -> None:
        self.seen += 1
        if self.seen < self.at or not self.left:
            return
        self.left -= 1
        assert self.main is not None
        if self.how == "cancel":
            self.main.get_loop().call_soon(self.main.cancel)
        else:
            raise self.how
