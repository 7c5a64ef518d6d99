"""From what users call their engine to the engines that a push reaches."""

from __future__ import annotations

from typing import Any

from instep.engine import Engine, connect
from instep.engine.ray import RayRpc
from instep.engine.rpc import LocalRpc, RemoteEngine, Rpc
from instep.errors import ConfigError


def reach(found: Any) -> list[Engine | Rpc]:
    """Engines of this process as they are, others by the way to them."""
    if isinstance(found, list | tuple):
        return [way for each in found for way in reach(each)]
    if hasattr(found, "aanswer"):  # a receiver
        return [LocalRpc(found.aanswer)]
    if hasattr(getattr(found, "answer", None), "remote"):
        return [RayRpc(found)]
    if in_actors(found):
        return reach(list(found.actors))
    if hasattr(found, "_actor_id"):
        raise ConfigError(
            "the engine's Ray actor has no method `answer`",
            next_step="give it one (docs/dropins.md), or start it with instep.dropin.torchrl.vllm_async.AsyncVLLM",
        )
    return [found if isinstance(found, Rpc) else connect(found)]


def engines(found: Any) -> list[Engine]:
    return [way if isinstance(way, Engine) else RemoteEngine(way) for way in reach(found)]


def in_actors(found: Any) -> bool:
    """Whether it stands for engines in Ray actors, as TorchRL's `AsyncVLLM` does."""
    return bool(getattr(found, "actors", None))
