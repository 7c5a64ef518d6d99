"""The engines of one trainer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from instep.engine import Engine
from instep.engine.member import Member
from instep.errors import EngineLost, EngineState, EngineTimeout, InstepError
from instep.protocol import AdapterConfig

T = TypeVar("T")
HURRY = 1.0  # seconds for an engine that has let a deadline pass already
OFTEN = 4  # times in the seconds after which silence is taken for death


class Fleet:
    """Asks all members at once; the slowest takes no longer than its timeout."""

    def __init__(self, engines: Sequence[Engine], session: str, timeout: float, adapter: AdapterConfig | None = None) -> None:
        self.session, self.timeout, self.adapter = session, timeout, adapter
        self.members = [Member(engine, session, timeout, adapter) for engine in engines]
        self.showing: set[asyncio.Task[None]] = set()
        self._tell_apart()

    def _tell_apart(self) -> None:
        taken: set[str] = set()
        for index, member in enumerate(self.members):
            if member.name in taken:
                member.engine.name = f"{member.name}-{index}"
            taken.add(member.name)

    def replace_lost(self, engine: Engine) -> None:
        """Adds an engine and forgets those that died; it takes over the name of the first of them."""
        lost = [member for member in self.members if isinstance(member.failure, EngineLost)]
        if lost:
            engine.name = lost[0].name
        self.members = [member for member in self.members if member not in lost] + [
            Member(engine, self.session, self.timeout, self.adapter)
        ]
        self._tell_apart()

    async def each(self, members: Sequence[Member], action: Callable[[Member], Awaitable[T]]) -> dict[str, T]:
        """The results by engine name. A member that fails keeps its error in `failure`.

        Those that are done before others are shown that their trainer lives.
        """
        waiting: list[Member] = []
        showing = asyncio.create_task(self._show(waiting))
        try:
            return await self._each(members, action, waiting)
        finally:
            showing.cancel()

    async def _show(self, waiting: Sequence[Member]) -> None:
        """Asks members for something without consequences, so that they hear of their trainer."""
        while True:
            await asyncio.sleep(self.timeout / OFTEN)
            for member in waiting:
                task = asyncio.create_task(member.alive())  # one that is cut short would look like a death
                self.showing.add(task)
                task.add_done_callback(self.showing.discard)

    async def _each(self, members: Sequence[Member], action: Callable[[Member], Awaitable[T]], done: list[Member]) -> dict[str, T]:
        async def one(member: Member) -> T | None:
            try:
                result = await action(member)
            except InstepError as error:
                member.failure = error
                return None
            member.failure = None
            done.append(member)
            return result

        results = await asyncio.gather(*(one(member) for member in members))
        return {member.name: result for member, result in zip(members, results, strict=True) if member.failure is None}  # type: ignore[misc]

    async def withdraw(self, members: Sequence[Member]) -> None:
        """Other trainers may push to these engines, whose workers have prepared a version or not. Failures stay what they are."""

        async def one(member: Member) -> None:
            late, phase = isinstance(member.failure, EngineTimeout), member.phase
            with suppress(InstepError, TimeoutError):
                async with asyncio.timeout(HURRY if late else None):
                    await member.abort()
            member.phase, member.serving = phase, "unknown" if late else member.serving

        await asyncio.gather(*(one(member) for member in members if not isinstance(member.failure, EngineLost)))

    def part(self) -> None:
        """Withdraws from engines that may have something prepared still. Waits for them `HURRY` seconds at most."""
        holding = [member for member in self.members if member.holding]
        if holding:
            thread = threading.Thread(target=lambda: asyncio.run(self.withdraw(holding)), daemon=True)
            thread.start()  # a loop may run in this one
            thread.join(HURRY)

    def states(self) -> tuple[EngineState, ...]:
        return tuple(member.state() for member in self.members)
