"""The handle of a Ray actor as an engine: requests of a `WeightSync` go to the actor, payloads
unchanged."""

from __future__ import annotations

from typing import Any

from instep.engine import CachePolicy, Engine
from instep.errors import EngineLost, InstepError
from instep.protocol import Method

METHODS = ("call", "pause", "resume", "label", "score", "refuse")


def adapt(obj: Any) -> Engine | None:
    """Returns an engine for a handle whose actor has an engine's methods; None for another
    object. Ray need not be installed."""
    if type(obj).__module__ != "ray.actor" or not all(hasattr(obj, method) for method in METHODS):
        return None
    return ActorHandleEngine(obj)


class ActorHandleEngine:
    """An engine whose methods call a Ray actor. Errors of instep that the actor raises are
    raised here. Any other failure is an `EngineLost`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.name = f"actor-{handle._actor_id.hex()[:8]}"

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        replies: list[bytes] = await self._ask("call", method, payload)
        return replies

    async def pause(self, caches: CachePolicy) -> None:
        await self._ask("pause", caches)

    async def resume(self) -> None:
        await self._ask("resume")

    async def label(self, version: str) -> None:
        await self._ask("label", version)

    async def score(self, token_ids: list[int]) -> list[float]:
        scores: list[float] = await self._ask("score", token_ids)
        return scores

    async def refuse(self, reason: str | None) -> None:
        await self._ask("refuse", reason)

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        """See `fused_commit.FusedCommit`. An actor with this method needs one call instead of
        four while it is paused."""
        if not hasattr(self.handle, "commit_at_once"):
            return None
        replies: list[bytes] | None = await self._ask("commit_at_once", payload, caches, version)
        return replies

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self.handle, method).remote(*arguments)
        except Exception as error:
            cause = getattr(error, "cause", None)  # Ray wraps what an actor raised
            if isinstance(cause, InstepError):
                raise cause from error
            raise EngineLost(f"{self.name} does not answer {method}: {type(error).__name__}: {error}") from error
