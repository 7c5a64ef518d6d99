"""Shares state between the actors of a fleet and their trainer: whether prompts may be taken,
and each actor's status."""

from __future__ import annotations

import math
import time
from typing import Any

from msgspec import Struct, structs

from instep.errors import ConfigError, GenerationError


class ActorStatus(Struct, frozen=True, kw_only=True):
    """The status of an actor.

    version: that it serves; None before the first push. prompts: under way, from taking them to
    handing over their result.
    samples: that hold a place in the engine. closed: why no turn may begin now. tokens: sampled so
    far.
    stale: results that were too old, and made again. lag: versions that the last result's oldest
    token was behind.
    errors: samples that ended in an error, or have no score because a verifier broke.
    """

    name: str
    version: str | None
    prompts: int
    samples: int
    places: int
    closed: list[str]
    answered: int = 0
    tokens: int = 0
    stale: int = 0
    lag: int = 0
    errors: int = 0
    failure: str | None = None


class ActorManager:
    """A plain object, or with `ray.remote(ActorManager).remote()` an actor, that is given to every
    `LLMActor` of a fleet."""

    def __init__(self) -> None:
        self._until = 0.0
        self._actors: dict[str, tuple[float, ActorStatus]] = {}

    def pause(self, seconds: float) -> None:
        """Keeps actors from taking prompts for so many seconds, or until `resume`. The bound
        lets a fleet go on whose trainer has died."""
        if not 0 < seconds < math.inf:
            raise ConfigError(f"seconds must be a positive number, not {seconds!r}")
        self._until = time.monotonic() + seconds

    def resume(self) -> None:
        self._until = 0.0

    def should_stop(self) -> bool:
        """Whether actors must not take prompts now. What they have begun goes on."""
        return time.monotonic() < self._until

    def report(self, status: ActorStatus) -> None:
        """Takes an actor's report of its own status."""
        self._actors[status.name] = (time.monotonic(), status)

    def status(self) -> dict[str, Any]:
        """Returns JSON types: `should_stop`, and for each actor its last report and how many
        seconds ago it came."""
        now = time.monotonic()
        actors = {name: {**structs.asdict(status), "seconds_ago": now - when} for name, (when, status) in self._actors.items()}
        return {"should_stop": self.should_stop(), "actors": actors}

    def check(self) -> None:
        """Raises `GenerationError` where an actor has failed."""
        failed = [f"{name}: {status.failure}" for name, (_, status) in self._actors.items() if status.failure]
        if failed:
            raise GenerationError("; ".join(failed), next_step="make new actors in their place; other actors go on")


async def ask(manager: Any, method: str, *arguments: Any) -> Any:
    """Calls a plain object's method, or that of a Ray actor's handle."""
    call = getattr(manager, method)
    remote = getattr(call, "remote", None)
    return await remote(*arguments) if remote else call(*arguments)
