"""The engines of one trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from instep.engine import Engine
from instep.engine.member import Member
from instep.errors import EngineLost, EngineState, InstepError
from instep.protocol import AdapterConfig

T = TypeVar("T")


class Fleet:
    """Asks all members at once; the slowest takes no longer than its timeout."""

    def __init__(self, engines: Sequence[Engine], session: str, timeout: float, adapter: AdapterConfig | None = None) -> None:
        self.session, self.timeout, self.adapter = session, timeout, adapter
        self.members = [Member(engine, session, timeout, adapter) for engine in engines]
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
        """The results by engine name. A member that fails keeps its error in `failure`."""

        async def one(member: Member) -> T | None:
            try:
                result = await action(member)
            except InstepError as error:
                member.failure = error
                return None
            member.failure = None
            return result

        results = await asyncio.gather(*(one(member) for member in members))
        return {member.name: result for member, result in zip(members, results, strict=True) if member.failure is None}  # type: ignore[misc]

    def states(self) -> tuple[EngineState, ...]:
        return tuple(member.state() for member in self.members)
