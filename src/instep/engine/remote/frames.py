"""Frames, which connections carry, and the requests that wait for their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from instep.errors import EngineLost


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A request, or the answer to the request of the same number."""

    number: int
    method: str
    payload: bytes


class Requests:
    """Requests of one connection, on its event loop. lost: why no more answers come, once they do
    not."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    @contextmanager
    def asking(self, method: str, payload: bytes) -> Iterator[tuple[Frame, asyncio.Future[bytes]]]:
        """Yields a request to send and the future of its answer. Once this has ended, a late
        answer is dropped. Raises `EngineLost` where no more answers come."""
        self.check()
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            yield Frame(number, method, payload), answer
        finally:
            del self._waiting[number]

    def answered(self, frame: Frame) -> None:
        if frame.number in self._waiting and not (answer := self._waiting[frame.number]).done():
            answer.set_result(frame.payload)

    def check(self) -> None:
        """Raises `EngineLost` where no more answers come."""
        if self.lost:
            raise EngineLost(self.lost)

    def lose(self, why: str) -> None:
        """Raises `EngineLost` in all waiting requests: no more answers come. The first reason
        stays."""
        self.lost = self.lost or why
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EngineLost(self.lost))


class Running:
    """Tasks that answer requests: event loops hold their tasks weakly."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
