"""Actors on Ray, a fleet of them.

    ray.init()
    queues = RolloutQueues()
    engines = create_vllm_engines(2, pretrain="model", max_restarts=3, prompt_queue=queues.prompts, results_queue=queues.results)
    sync = WeightSync(model, engines=engines)
    sync.push("step-1")
    queues.prompts.put(request)
    result = queues.results.get(timeout=60)                               # on `queue.Empty`: sync.catch_up(), for restarted actors

Calls of one actor do not wait for each other: `generate` has a concurrency group, what a `WeightSync` asks has another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from instep.engine import CachePolicy
from instep.engine.serving import KVCacheInfo, ModelDims, Serving
from instep.engine.vllm_serving import start_vllm
from instep.errors import ConfigError, EngineTimeout
from instep.generation.actor import LLMActor
from instep.generation.manager import ActorManager, ActorStatus
from instep.generation.queues import Queue
from instep.generation.ray_queues import RolloutQueues
from instep.generation.rewards import RewardConfig
from instep.generation.types import GenerationResult, PromptId, PromptRequest
from instep.generation.work import BEAT
from instep.protocol import Method

__all__ = ["ActorManager", "GenerationResult", "LLMRayActor", "PromptRequest", "RewardConfig", "RolloutQueues", "create_vllm_engines"]

GROUPS = {"control": 32, "generation": 4096}
"""Calls of one actor that may run at the same time, by group."""
ENGINE_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0"}
"""As trainers set it: groups of NCCL need it to be equal at both ends."""


class LLMRayActor:
    """An `LLMActor` in a Ray actor. Arguments are the same; an actor that Ray has restarted takes no prompt before it has the weights."""

    def __init__(self, start: Callable[[], Awaitable[Serving]], **options: Any) -> None:
        self.name = options.get("name", "actor")
        if ray.get_runtime_context().was_current_actor_reconstructed:
            options["await_weights"] = True
        self.actor = LLMActor(start, **options)

    def __repr__(self) -> str:
        return f"LLMRayActor({self.name})"

    @ray.method(concurrency_group="generation")
    async def until_over(self, worker: str) -> None:
        """Returns when this actor is not, or no longer, at work in that worker process: restarted, failed or stopped."""
        while worker == ray.get_runtime_context().get_worker_id() and self.actor.works():  # noqa: ASYNC110
            await asyncio.sleep(BEAT)

    @ray.method(concurrency_group="generation")
    async def generate(self, request: PromptRequest) -> GenerationResult:
        return await self.actor.generate(request)

    @ray.method(concurrency_group="control")
    async def cancel(self, prompt: PromptId) -> bool:
        return await asyncio.to_thread(self.actor.cancel, prompt)

    @ray.method(concurrency_group="control")
    async def ready(self) -> bool:
        return self.actor.ready()

    @ray.method(concurrency_group="control")
    async def check_background_threads(self) -> None:
        self.actor.check_background_threads()

    @ray.method(concurrency_group="control")
    async def status(self) -> ActorStatus:
        return await asyncio.to_thread(self.actor.status)

    @ray.method(concurrency_group="control")
    async def url(self) -> str | None:
        return self.actor.url

    @ray.method(concurrency_group="control")
    async def get_kv_cache_info(self) -> KVCacheInfo:
        return self.actor.get_kv_cache_info()

    @ray.method(concurrency_group="control")
    async def get_model_dims(self) -> ModelDims:
        return self.actor.get_model_dims()

    @ray.method(concurrency_group="control")
    async def reset_prefix_cache(self) -> bool:
        return await asyncio.to_thread(self.actor.reset_prefix_cache)

    @ray.method(concurrency_group="control")
    async def stop(self, drain: bool = True, timeout: float = 60.0) -> list[PromptRequest]:  # noqa: ASYNC109
        return await asyncio.to_thread(self.actor.stop, drain=drain, timeout=timeout)

    @ray.method(concurrency_group="control")
    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        return await self.actor.call(method, payload)

    @ray.method(concurrency_group="control")
    async def pause(self, caches: CachePolicy) -> None:
        await self.actor.pause(caches)

    @ray.method(concurrency_group="control")
    async def resume(self) -> None:
        await self.actor.resume()

    @ray.method(concurrency_group="control")
    async def label(self, version: str) -> None:
        await self.actor.label(version)

    @ray.method(concurrency_group="control")
    async def score(self, token_ids: list[int]) -> list[float]:
        return await self.actor.score(token_ids)

    @ray.method(concurrency_group="control")
    async def refuse(self, reason: str | None) -> None:
        await self.actor.refuse(reason)


def create_vllm_engines(
    num_engines: int,
    *,
    pretrain: str,
    tensor_parallel_size: int = 1,
    enforce_eager: bool = False,
    tokenizer_name_or_path: str | None = None,
    revision: str | None = None,
    seed: int = 0,
    enable_prefix_caching: bool = True,
    max_model_len: int | None = None,
    vllm_gpu_memory_utilization: float = 0.9,
    prompt_queue: Queue | None = None,
    results_queue: Queue | None = None,
    eval_results_queue: Queue | None = None,
    actor_manager: Any = None,
    pg: PlacementGroup | None = None,
    gpus_per_engine: float | None = None,
    max_restarts: int = 0,
    engine_args: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 1200.0,
    **options: Any,
) -> list[Any]:
    """Handles of `num_engines` actors that are ready, each with an engine of its own.

    seed: engine i has seed + i. engine_args: further arguments of `vllm.AsyncEngineArgs`. environment: variables of the actors' processes.
    options: those of `LLMActor`, the same for all.
    pg: a placement group to share with a trainer: engine i is put into its bundle i, and takes `gpus_per_engine` of a GPU there, half if
        None. Without one the engines get a group of their own where the cluster has GPUs, and a CPU for each worker where it has none.

    Raises `ConfigError` for arguments that do not go together, `EngineTimeout` where engines are not ready within `timeout` seconds, and
    what an actor raised. No actor is left then.
    """
    if num_engines < 1 or tensor_parallel_size < 1:
        raise ConfigError("there must be at least one engine, of at least one worker")
    if pg is not None and tensor_parallel_size > 1:
        raise ConfigError("engines that share their GPUs with a trainer have one worker each: tensor_parallel_size must be 1")
    if pg is not None and len(pg.bundle_specs) < num_engines:
        raise ConfigError(f"{num_engines} engines do not go into {len(pg.bundle_specs)} bundles")
    arguments = {
        "tensor_parallel_size": tensor_parallel_size, "enforce_eager": enforce_eager, "tokenizer": tokenizer_name_or_path,
        "revision": revision, "enable_prefix_caching": enable_prefix_caching, "max_model_len": max_model_len,
        "gpu_memory_utilization": vllm_gpu_memory_utilization,
        "distributed_executor_backend": "uni" if tensor_parallel_size == 1 else "mp",  # workers are processes of the actor's own
        **(engine_args or {}),
    }  # fmt: skip
    options |= {
        "prompt_queue": prompt_queue, "results_queue": results_queue, "eval_results_queue": eval_results_queue,
        "actor_manager": actor_manager, "start_timeout": timeout,
    }  # fmt: skip
    own = None
    if pg is None and _resources("cluster").get("GPU", 0):
        own = pg = _group(num_engines, tensor_parallel_size, timeout)
    gpus = float(tensor_parallel_size) if own else 0.5 if gpus_per_engine is None else gpus_per_engine
    kind: Any = ray.remote(concurrency_groups=GROUPS)(LLMRayActor)  # type: ignore[call-overload]
    engines = []
    for index in range(num_engines):
        placed: dict[str, Any] = {"num_cpus": tensor_parallel_size}
        if pg is not None:
            strategy = PlacementGroupSchedulingStrategy(pg, index, placement_group_capture_child_tasks=True)
            placed = {"num_cpus": tensor_parallel_size if own else 0, "num_gpus": gpus, "scheduling_strategy": strategy}
        start = partial(start_vllm, pretrain, seed=seed + index, **arguments)
        variables = {"env_vars": {**ENGINE_ENVIRONMENT, **(environment or {})}}
        configured = kind.options(max_restarts=max_restarts, runtime_env=variables, **placed)
        engines.append(configured.remote(start, name=f"engine-{index}", **options))
    try:
        ray.get([engine.ready.remote() for engine in engines], timeout=timeout)
    except BaseException as error:
        for engine in engines:
            ray.kill(engine)
        if own is not None:
            remove_placement_group(own)
        if isinstance(error, ray.exceptions.GetTimeoutError):
            raise EngineTimeout(f"{num_engines} engines were not ready within {timeout:g} s: {_free()}") from None
        raise
    return engines


def _group(num_engines: int, workers: int, timeout: float) -> PlacementGroup:
    """A bundle is on one node, so that an engine never spreads over nodes."""
    group: PlacementGroup = placement_group([{"GPU": workers, "CPU": workers}] * num_engines, strategy="PACK")
    if not group.wait(timeout):
        remove_placement_group(group)
        raise EngineTimeout(f"{num_engines} times {workers} GPUs were not to be had within {timeout:g} s: {_free()}")
    return group


def _resources(which: Literal["cluster", "available"]) -> dict[str, float]:
    found: dict[str, float] = getattr(ray, f"{which}_resources")()
    return found


def _free() -> str:
    total, free = _resources("cluster"), _resources("available")
    return "of the cluster are free " + ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
