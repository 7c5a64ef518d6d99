"""The engines of one trainer."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import Any, TypeVar

from instep.engine import connect
from instep.engine.known import HURRY
from instep.engine.member import Member
from instep.engine.silent import Silent
from instep.errors import ConfigError, EngineLost, EngineState, EngineTimeout, InstepError
from instep.protocol import AdapterConfig
from instep.shielded import to_the_end

T = TypeVar("T")
AT_ONCE = 64
"""Engines that a fleet begins to ask at one time."""
BEGUN = 0.1  # seconds after which an engine is at work elsewhere, and the next one may begin
OFTEN = 4  # times in the seconds after which silence is taken for death
PATIENCE = 10.0
"""Seconds, at most, for an engine to say what it holds after a push was broken off."""


class Fleet:
    """Asks members side by side; the slowest takes no longer than its timeout.

    At most `AT_ONCE` of them begin together. An engine keeps its turn until it has answered, or for
    `BEGUN` seconds: one that hangs, or computes in another process, holds nobody up.
    """

    def __init__(self, engines: Sequence[Any], session: str, timeout: float, adapter: AdapterConfig | None = None) -> None:
        """engines: objects that `connect` takes. Raises `ConfigError` as `connect` does."""
        self.session, self.timeout, self.adapter = session, timeout, adapter
        self.members: list[Member] = []
        self.members = [self._member(engine) for engine in engines]
        self.showing: set[asyncio.Task[None]] = set()
        self.silent = Silent()
        self._tell_apart()

    def _member(self, given: Any) -> Member:
        # Its requests follow those to an engine whose place it takes: it may be the same one.
        seq = max((member.seq for member in self.members), default=0)
        return Member(connect(given), self.session, self.timeout, self.adapter, seq, given=given)

    def _tell_apart(self) -> None:
        taken: set[str] = set()
        for index, member in enumerate(self.members):
            if member.name in taken:
                member.engine.name = f"{member.name}-{index}"
            taken.add(member.name)

    async def take_in(self, engine: Any) -> None:
        """Adds an engine, which takes over the name of the first one that died, and forgets
        those that died.

        Raises `ConfigError` for one that is listed already and has not died.
        """
        new = self._member(engine)
        await self.each(self.members, Member.hello)  # who has died is known once it was asked
        lost = [member for member in self.members if isinstance(member.failure, EngineLost)]
        stay = [member for member in self.members if member not in lost]
        await self.each([new], Member.hello)
        for member in stay:
            if member.is_given(engine) or member.shares_workers(new):
                raise ConfigError(f"{member.name} is listed already", next_step="catch_up() without an engine brings it along")
        if lost:
            new.engine.name = lost[0].name
        self.members = [*stay, new]
        self._tell_apart()

    def check_apart(self) -> None:
        """Raises `ConfigError` if two of the list turn out to be one engine, such as two URLs of
        one server."""
        for member, other in combinations(self.members, 2):
            if member.shares_workers(other):
                raise ConfigError(f"{member.name} and {other.name} are one engine: it is listed twice", next_step="list it once")

    async def each(self, members: Sequence[Member], action: Callable[[Member], Awaitable[T]]) -> dict[str, T]:
        """Runs `action` for each member. Returns the results by engine name. A member that fails
        keeps its error in `failure`.

        Those that are done before others are shown that their trainer lives. Raises what is no
        `InstepError` when the others have been cancelled and are over.
        """
        if not members:
            return {}
        waiting: list[Member] = []
        with self._shown(waiting):
            return await self._each(members, action, waiting)

    @contextmanager
    def _shown(self, waiting: Sequence[Member]) -> Iterator[None]:
        """Asks waiting members for their status now and then, so that they know that their
        trainer lives."""
        loop, interval = asyncio.get_running_loop(), self.timeout / OFTEN

        def show() -> None:
            timers.append(loop.call_later(interval, show))
            for member in waiting:
                task = loop.create_task(member.alive())  # one that is cut short would look like a death
                self.showing.add(task)
                task.add_done_callback(self.showing.discard)

        timers = deque([loop.call_later(interval, show)], maxlen=1)  # no task: every push would make one
        try:
            yield
        finally:
            timers.pop().cancel()

    async def _each(self, members: Sequence[Member], action: Callable[[Member], Awaitable[T]], done: list[Member]) -> dict[str, T]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(member: Member) -> T | None:
            try:
                async with _Turn(turns):
                    result = await action(member)
            except InstepError as error:
                member.failure = error
                return None
            member.failure = None
            done.append(member)
            return result

        tasks = [asyncio.ensure_future(one(member)) for member in members]
        try:
            results = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await to_the_end(lambda: _over(tasks), times=2)
            raise
        return {member.name: result for member, result in zip(members, results, strict=True) if member.failure is None}  # type: ignore[misc]

    async def hello(self, *, every: bool, silent: bool) -> None:
        """Asks members what they serve.

        every: all of them have their whole timeout. Otherwise one that has let a deadline pass is
        left out until it answers a question beside a push, or, with silent, has `HURRY` seconds.
        """

        async def hurried(member: Member) -> None:
            with member.hurried():
                await member.hello()

        late = [] if every else self._late()
        if not silent:
            self.silent.ask(late)
        await self.each([member for member in self.members if member not in late], Member.hello)
        if silent:
            await self.each(late, hurried)
        else:
            await self.each([member for member in late if self.silent.answered(member)], Member.hello)

    def ask_again(self) -> None:
        """Begins, after a push, to ask the engines that have let a deadline pass in it."""
        self.silent.ask(self._late())

    def _late(self) -> list[Member]:
        return [member for member in self.members if isinstance(member.failure, EngineTimeout)]

    async def settle(self, version: str) -> None:
        """Settles all engines after a push of `version` was broken off: none is left paused or
        with a lease.

        Ends a second after `PATIENCE`, or after the timeout where that is less.
        """
        limit = min(self.timeout, PATIENCE)
        left = [member for member in self.members if member.unsettled()]
        await asyncio.gather(*(member.settle(version, limit) for member in left))

    async def withdraw(self, members: Sequence[Member]) -> None:
        """Ends this trainer's lease on these engines, so that other trainers may push to them.
        Their failures and phases stay as they are."""

        async def one(member: Member) -> None:
            late, phase = isinstance(member.failure, EngineTimeout), member.phase
            with suppress(InstepError, TimeoutError):
                async with asyncio.timeout(HURRY if late else None):
                    await member.abort()
            member.phase, member.serving = phase, "unknown" if late else member.serving

        await asyncio.gather(*(one(member) for member in members if not isinstance(member.failure, EngineLost)))

    def part(self) -> None:
        """Withdraws from engines that may still have a version prepared. Waits for them `HURRY`
        seconds at most."""
        holding = [member for member in self.members if member.holding]
        if holding:
            thread = threading.Thread(target=lambda: asyncio.run(self.withdraw(holding)), daemon=True)
            thread.start()  # a loop may run in this one
            thread.join(HURRY)

    def states(self) -> tuple[EngineState, ...]:
        return tuple(member.state() for member in self.members)


class _Turn:
    """A member's turn, held while it is asked. It ends with the request, or after `BEGUN` seconds.

    No generator: each of hundreds of engines has two turns in a push.
    """

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self.turns, self.held = turns, False

    async def __aenter__(self) -> None:
        await self.turns.acquire()
        self.held = True
        self.timer = asyncio.get_running_loop().call_later(BEGUN, self._end)

    def _end(self) -> None:
        if self.held:
            self.held = False
            self.turns.release()

    async def __aexit__(self, *_: object) -> None:
        self.timer.cancel()
        self._end()


async def _over(tasks: Sequence[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
