"""The order in which requests change what an engine does.

A trainer that has given up on a step asks for the next one while the first still runs, and so may
another trainer. So a pause, a label and a resume run one after the other, in the order in which
they came, and none but a pause runs beside a commit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

POLL = 0.003  # seconds between two looks: whoever is waited for may be on another event loop


class Turns:
    """The turns of one engine. `lock` is held by whoever changes what the engine does."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.committing: set[str] = set()
        """Trainers with a commit that runs, and that its workers may still take."""

    @asynccontextmanager
    async def change(self, *, beside_commit: bool = False) -> AsyncIterator[None]:
        await _until(lambda: self.lock.acquire(blocking=False))
        try:
            if not beside_commit:
                await _until(lambda: not self.committing)
            yield
        finally:
            self.lock.release()

    @asynccontextmanager
    async def commit(self, session: str, check: Callable[[], None]) -> AsyncIterator[None]:
        """Holds a turn to begin a commit, and counts the commit as running until this ends.
        check: raises if the engine is not in the state that a commit needs."""
        async with self.change(beside_commit=True):
            check()
            self.committing.add(session)
        try:
            yield
        finally:
            self.committing.discard(session)

    def call_off(self, session: str) -> None:
        """Forgets this trainer's commit: all workers have answered its abort, and take no commit
        from before it."""
        self.committing.discard(session)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(POLL)
