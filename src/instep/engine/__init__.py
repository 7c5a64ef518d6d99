"""Engines: the interface that a push needs.

    engine = connect(llm)                # vllm.LLM or AsyncLLM
    engine = connect("http://gpu1:8000") # a server that `instep serve` started
    engine = connect(handle)             # of a Ray actor that has these methods, as `generation.ray.LLMRayActor` does
    engine = connect(MemoryEngine(...))  # the public test double
    engine = connect(hf_model_engine)    # TransformersEngine, embedded

An engine has one worker per TP/PP rank. `call` carries one request to all of them and brings back
one reply each; everything that touches weights happens in the worker's `instep.receiver.Receiver`,
the same code for every engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, Protocol, runtime_checkable

from instep.errors import ConfigError
from instep.protocol import Method

CachePolicy = Literal["reset", "keep"]

UNLABELLED = "unknown"
"""Label of tokens made with weights that something else than a push has changed."""

ADAPTERS = ("instep.engine.remote.http", "instep.engine.vllm.engine", "instep.engine.remote.actor_handle")
"""Modules with `adapt(obj) -> Engine | None`, asked in order for objects that are no engines
themselves."""


@runtime_checkable
class Engine(Protocol):
    """One inference engine. The caller bounds every method by a deadline, and retries none."""

    name: str

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        """Runs `method` in every worker, between two engine steps. Returns one encoded `Reply`
        per worker.

        Raises `EngineLost` when a worker's process is gone.
        """

    async def pause(self, caches: CachePolicy) -> None:
        """Returns when no engine step runs or begins until `resume`. Requests in flight stay.
        With `reset`, their KV and the prefix cache are dropped, and recomputed after `resume`."""

    async def resume(self) -> None: ...

    async def label(self, version: str) -> None:
        """Labels the tokens that are generated from now on with `version`."""

    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns log-probabilities (natural log) of `token_ids[1:]`, each given the tokens
        before it, with the weights being served."""

    async def refuse(self, reason: str | None) -> None:
        """Ends requests in flight, and makes `generate` raise `EngineDirty` for `reason`. With
        None, the engine generates again."""


def connect(obj: Any) -> Engine:
    """Returns the engine for an object that users hold. Raises `ConfigError` for any other
    object."""
    if isinstance(obj, Engine):
        return obj
    for adapter in ADAPTERS:
        engine: Engine | None = import_module(adapter).adapt(obj)
        if engine is not None:
            return engine
    raise ConfigError(
        f"cannot push to {type(obj).__name__}: give a vllm.LLM, an AsyncLLM, a server's URL, the handle of a Ray actor that is an "
        "engine, a MemoryEngine, a TransformersEngine or your own instep Engine"
    )
