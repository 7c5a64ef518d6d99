"""Each numbered request of a client runs at most once, however often it is sent."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

WINDOW, CLIENTS, ANSWERS = 256, 64, 64
Action = Callable[[], Coroutine[Any, Any, bytes]]


class Stale(Exception):
    """The request is not run: its answer is forgotten, or it repeats one that has never arrived."""


class Once:
    """Keeps the answers of the last requests. Use it on one event loop.

    Requests of a client may overtake each other by up to `WINDOW` numbers.
    """

    def __init__(self) -> None:
        self.numbers: OrderedDict[str, set[int]] = OrderedDict()  # that each client has used
        self.answers: OrderedDict[tuple[str, int], tuple[str, asyncio.Task[bytes]]] = OrderedDict()

    def run(self, client: str, number: int, method: str, *, again: bool, action: Action) -> asyncio.Task[bytes]:
        """Returns the task that runs `action`: a new one, or the one of an earlier request with
        this number.

        again: the request must have been seen before. Raises `Stale` where it was not, and for a
        number whose answer is forgotten.
        """
        known = self.answers.get((client, number))
        if known is not None:
            if known[0] != method:
                raise Stale(f"number {number} was another request, {known[0]}")
            return known[1]
        used = self.numbers.setdefault(client, set())
        self.numbers.move_to_end(client)
        if number in used or number <= max(used, default=0) - WINDOW:
            raise Stale(f"number {number} of this client was answered before")
        if again:
            raise Stale(f"{method} number {number} has not arrived before: nothing was done")
        used.add(number)
        used.difference_update([old for old in used if old <= max(used) - WINDOW])
        task = asyncio.ensure_future(action())
        self.answers[client, number] = method, task
        while len(self.answers) > ANSWERS:
            self.answers.popitem(last=False)
        while len(self.numbers) > CLIENTS:
            self.numbers.popitem(last=False)
        return task

    def latest(self, client: str) -> int:
        """The highest number that a client has used."""
        return max(self.numbers.get(client, ()), default=0)
