"""What a `WeightSync` makes of a Ray actor's handle: bytes through, instep's own errors through, everything else is a lost engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import WeightSync
from instep.engine import connect
from instep.engine.memory import MemoryEngine
from instep.errors import ConfigError, EngineLost, EngineTimeout
from unit.test_trust import AtOnceEngine


class Wrapped(Exception):
    """As Ray wraps what an actor raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"in the actor: {cause}")
        self.cause = cause


class Method:
    def __init__(self, method: Any) -> None:
        self.method = method

    async def remote(self, *arguments: Any) -> Any:
        try:
            return await self.method(*arguments)
        except Exception as error:
            raise Wrapped(error) from None


class Id:
    def hex(self) -> str:
        return "0123456789abcdef"


class ActorHandle:
    """Knows methods, and nothing else of its actor, as Ray's handle."""

    _actor_id = Id()

    def __init__(self, actor: Any, *without: str) -> None:
        for method in {"call", "pause", "resume", "label", "score", "refuse", "commit_at_once"} - set(without):
            if hasattr(actor, method):
                setattr(self, method, Method(getattr(actor, method)))


ActorHandle.__module__ = "ray.actor"


@pytest.mark.parametrize("kind", [MemoryEngine, AtOnceEngine])
def test_a_push_reaches_the_engine_behind_a_handle(kind: type[MemoryEngine], segments: Path) -> None:
    tensors = {"model.norm.weight": torch.rand(8)}
    engine = kind({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    with WeightSync(tensors, [ActorHandle(engine)]) as sync:
        receipt = sync.push("v1")
    assert [one.engine for one in receipt.engines] == ["actor-01234567"]
    assert [call for call in engine.calls if call != "refuse"][-5:] == ["pause", "commit", "label", "resume", "abort"]
    assert ("at once" in engine.calls) == (kind is AtOnceEngine)
    assert engine.version == "v1"
    assert torch.equal(engine.hosts[0].model.get_parameter("model.norm.weight"), tensors["model.norm.weight"])


def test_an_error_of_the_actor_comes_through_and_a_death_is_a_lost_engine() -> None:
    class Fails:
        async def call(self, *_: Any) -> None:
            raise EngineTimeout("did not end 3 turns")

        async def pause(self, *_: Any) -> None:
            raise RuntimeError("actor died")

        resume = label = score = refuse = pause

    engine = connect(ActorHandle(Fails()))
    with pytest.raises(EngineTimeout, match="did not end 3 turns"):
        asyncio.run(engine.call("hello", b""))
    with pytest.raises(EngineLost, match="actor-01234567 does not answer pause: Wrapped: in the actor: actor died"):
        asyncio.run(engine.pause("reset"))


def test_the_handle_of_another_actor_is_no_engine() -> None:
    with pytest.raises(ConfigError, match="cannot push to ActorHandle"):
        connect(ActorHandle(MemoryEngine({"model.norm.weight": torch.rand(8)}), "refuse"))
