"""The handle of a Ray actor as an engine: requests of a `WeightSync` go to the actor, payloads
unchanged."""

from __future__ import annotations

from typing import Any, TypeVar

from instep.engine import CachePolicy, Engine
from instep.engine.remote.asked import AskedEngine
from instep.errors import EngineLost, InstepError

T = TypeVar("T")
METHODS = ("call", "pause", "resume", "label", "score", "refuse")


def adapt(obj: Any) -> Engine | None:
    """Returns an engine for a handle whose actor has an engine's methods; None for another
    object. Ray need not be installed."""
    if type(obj).__module__ != "ray.actor" or not all(hasattr(obj, method) for method in METHODS):
        return None
    return ActorHandleEngine(obj)


class ActorHandleEngine(AskedEngine):
    """An engine whose methods call a Ray actor. Errors of instep that the actor raises are
    raised here. Any other failure is an `EngineLost`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.name = f"actor-{handle._actor_id.hex()[:8]}"

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        """See `fused_commit.FusedCommit`. An actor with this method needs one call instead of
        four while it is paused."""
        if not hasattr(self.handle, "commit_at_once"):
            return None
        return await self.ask(list[bytes], "commit_at_once", payload, caches, version)  # or None, as the actor says

    async def ask(self, kind: type[T], method: str, *args: Any) -> T:  # noqa: ARG002
        try:
            answer: T = await getattr(self.handle, method).remote(*args)
        except Exception as error:
            cause = getattr(error, "cause", None)  # Ray wraps what an actor raised
            if isinstance(cause, InstepError):
                raise cause from error
            raise EngineLost(f"{self.name} does not answer {method}: {type(error).__name__}: {error}") from error
        return answer
