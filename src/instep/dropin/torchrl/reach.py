"""From what users call their engine to the engines that a push reaches."""

from __future__ import annotations

import re
from multiprocessing.connection import Connection
from typing import Any

from torch import nn

from instep.engine import Engine, connect
from instep.engine.remote.pipe import PipeDoor, PipeRpc
from instep.engine.remote.ray import RayRpc
from instep.engine.remote.rpc import Door, LocalRpc, RemoteEngine, Rpc
from instep.errors import ConfigError

STEP = re.compile(r"\.?([^.\[\]]+)|\[(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\]")


def reach(found: Any) -> list[Engine | Rpc]:
    """Engines of this process as they are, others by the way to them."""
    if isinstance(found, list | tuple):
        return [way for each in found for way in reach(each)]
    if isinstance(found, Connection):
        return [PipeRpc(found)]
    if hasattr(found, "aanswer"):  # a receiver
        return [LocalRpc(found.aanswer)]
    if hasattr(getattr(found, "answer", None), "remote"):
        return [RayRpc(found)]
    if in_actors(found):
        return reach(list(found.actors))
    if hasattr(found, "_actor_id"):
        raise ConfigError(
            "the engine's Ray actor has no method `answer`",
            next_step="give it one (docs/dropins.md), or start it with instep.dropin.torchrl.AsyncVLLM",
        )
    if isinstance(found, Rpc):
        return [found]
    engine = engine_of(found)
    return [connect(engine)] if engine is found else reach(engine)


def engines(found: Any) -> list[Engine]:
    return [way if isinstance(way, Engine) else RemoteEngine(way) for way in reach(found)]


def in_actors(found: Any) -> bool:
    """Whether it stands for engines in Ray actors, as TorchRL's `AsyncVLLM` does."""
    return bool(getattr(found, "actors", None))


def ways_to_actors(found: Any) -> list[RayRpc]:
    """Raises `ConfigError` for actors that have no way in."""
    return [way for way in reach(list(found.actors)) if isinstance(way, RayRpc)]


def engine_of(found: Any) -> Any:
    """The engine of a policy, which holds it as `model`, as TorchRL's `vLLMWrapper` does; anything
    else as it is."""
    return found.model if isinstance(found, nn.Module) and hasattr(found, "model") and not isinstance(found, Engine) else found


def door_of(pipe: Any) -> Door:
    """The engine's side of whatever a worker is reached through: an end of a pipe, or a `Door`."""
    if isinstance(pipe, Connection):
        return PipeDoor(pipe)
    if not (callable(getattr(pipe, "serve", None)) and callable(getattr(pipe, "close", None))):
        raise ConfigError(
            f"a {type(pipe).__name__} is no way to a trainer",
            next_step="give an end of multiprocessing.Pipe(), or an object with serve(answer) and close() (instep.engine.remote.rpc.Door)",
        )
    door: Door = pipe
    return door


def resolve(context: Any, path: str) -> Any:
    """What a path such as `policy`, `env.transform[0]` or `models['actor']` leads to from
    `context`.

    Raises `ConfigError`, which says how far the path leads.
    """
    found, passed = context, type(context).__name__
    for step in STEP.finditer(path):
        name, *quoted, index = step.groups()
        key = next((each for each in quoted if each is not None), index)
        try:
            if name is not None:
                found = getattr(found, name)
            else:
                found = found[int(key) if index is not None and key.lstrip("-").isdigit() else key]
        except (AttributeError, LookupError, TypeError) as error:
            raise ConfigError(f"{path!r} leads nowhere: {passed} has no {step.group().lstrip('.')}") from error
        passed = f"{passed}{step.group() if step.group()[0] in '.[' else '.' + step.group()}"
    return found
