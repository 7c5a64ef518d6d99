"""Engines that have let a deadline pass, and that no push waits for until they answer again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress

from instep.engine.member import Member
from instep.protocol import Request, encode

QUESTION = encode(Request(0, ""))
"""Asks who is there. No trainer's name is on it, so that no lease begins or goes on."""


class Silent:
    """Asks each silent engine in a thread of its own, one question at a time.

    Such a thread outlives the push that began it: an engine may take longer to answer than the
    others take to serve a version.
    """

    def __init__(self) -> None:
        self._asking: dict[int, threading.Thread] = {}
        self._answered: set[int] = set()

    def ask(self, members: Sequence[Member]) -> None:
        """Begins to ask those members that have not answered and are not being asked already."""
        for member in members:
            thread, key = self._asking.get(id(member)), id(member)
            if key not in self._answered and (thread is None or not thread.is_alive()):
                thread = threading.Thread(target=self._ask, args=(member, member.timeout), name="instep-silent", daemon=True)
                self._asking[key] = thread
                thread.start()

    def answered(self, member: Member) -> bool:
        """Whether an engine has answered since it fell silent. True once for each answer."""
        found = id(member) in self._answered
        self._answered.discard(id(member))
        return found

    def _ask(self, member: Member, seconds: float) -> None:
        async def question() -> None:
            async with asyncio.timeout(seconds):
                await member.engine.call("hello", QUESTION)
            self._answered.add(id(member))

        with suppress(Exception):  # it is asked again in the next push
            asyncio.run(question())
