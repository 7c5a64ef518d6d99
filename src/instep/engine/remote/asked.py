"""An engine of another process, whatever carries the requests to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from instep.engine import CachePolicy
from instep.protocol import Method

T = TypeVar("T")


class AskedEngine(ABC):
    """An engine whose every method is a request to another process."""

    name: str

    @abstractmethod
    async def ask(self, kind: type[T], method: str, *args: Any) -> T:
        """Returns what the engine's `method` returned there, a `kind`. Raises what it raised."""

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        return await self.ask(list[bytes], "call", method, payload)

    async def pause(self, caches: CachePolicy) -> None:
        await self.ask(type(None), "pause", caches)

    async def resume(self) -> None:
        await self.ask(type(None), "resume")

    async def label(self, version: str) -> None:
        await self.ask(type(None), "label", version)

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self.ask(list[float], "score", token_ids)

    async def refuse(self, reason: str | None) -> None:
        await self.ask(type(None), "refuse", reason)
