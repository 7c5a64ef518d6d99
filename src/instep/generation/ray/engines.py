"""A fleet of actors on Ray.

    ray.init()
    queues = RolloutQueues()
    engines = create_vllm_engines(2, pretrain="model", max_restarts=3, prompt_queue=queues.prompts, results_queue=queues.results)
    sync = WeightSync(model, engines=engines)
    sync.push("step-1")
    queues.prompts.put(request)
    result = queues.results.get(timeout=60)

An actor that Ray has restarted waits for weights: `sync.catch_up()` brings it the current ones, and
so does the next push.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from instep.engine.vllm.serving import start_vllm
from instep.errors import ConfigError, EngineTimeout
from instep.extras import needed_by
from instep.generation.actor.manager import ActorManager
from instep.generation.ray.actor import GROUPS, LLMRayActor, grouped
from instep.generation.ray.arguments import actor_options, engine_arguments
from instep.generation.ray.placement import bundles, places
from instep.generation.ray.queues import RolloutQueues
from instep.generation.rewards.config import RewardConfig
from instep.generation.types import GenerationResult, PromptRequest
from instep.transport.group import both_ends

with needed_by("a fleet of actors"):
    import ray
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

__all__ = ["ActorManager", "GenerationResult", "LLMRayActor", "PromptRequest", "RewardConfig", "RolloutQueues", "create_vllm_engines"]


def create_vllm_engines(
    num_engines: int,
    tensor_parallel_size: int = 1,
    enforce_eager: bool = False,
    tokenizer_name_or_path: str | None = None,
    pretrain: str | None = None,
    revision: str | None = None,
    seed: int = 0,
    enable_prefix_caching: bool = True,
    max_model_len: int | None = None,
    vllm_gpu_memory_utilization: float = 0.9,
    single_gpu_mode: bool = False,
    pg: PlacementGroup | None = None,
    *,
    vllm_dtype: str | None = None,
    gpus_per_engine: float | None = None,
    max_restarts: int = 0,
    engine_args: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 1200.0,
    **options: Any,
) -> list[Any]:
    """Starts `num_engines` actors, each with an engine of its own. Returns their handles when
    all are ready.

    seed: engine i has seed + i. vllm_dtype: of the engine's weights, the checkpoint's if None.
    engine_args: further arguments of
        `vllm.AsyncEngineArgs`. environment: variables of the actors' processes.
    options: those of `LLMRayActor` and of `LLMActor`, the same for all.
    pg: a placement group to share with a trainer: engine i is put into bundle i, counted node by
        node, and takes `gpus_per_engine` of a GPU there, half if None. Without one the engines get
        a group of their own where the cluster has GPUs, and a CPU for each worker where it has
        none. single_gpu_mode: such a group is meant, and must be given.

    Raises `ConfigError` for arguments that do not go together or that nobody honours, before any
    process is started; `EngineTimeout` where engines are not ready within `timeout` seconds, and
    what an actor raised. No actor is left then.
    """
    options = {"start_timeout": timeout, **options}
    if num_engines < 1 or tensor_parallel_size < 1:
        raise ConfigError("there must be at least one engine, of at least one worker")
    if pretrain is None:
        raise ConfigError("pretrain is missing: the name or directory of a model")
    if single_gpu_mode and pg is None and _resources("cluster").get("GPU", 0):
        raise ConfigError("single_gpu_mode shares the GPUs of a placement group with a trainer, and there is no pg")
    actor_options(**options)
    arguments = {
        "tensor_parallel_size": tensor_parallel_size, "enforce_eager": enforce_eager, "tokenizer": tokenizer_name_or_path,
        "revision": revision, "tokenizer_revision": revision, "enable_prefix_caching": enable_prefix_caching,
        "max_model_len": max_model_len, "gpu_memory_utilization": vllm_gpu_memory_utilization,
        "distributed_executor_backend": "uni" if tensor_parallel_size == 1 else "mp",  # workers are processes of the actor's own
        **({"dtype": vllm_dtype} if vllm_dtype else {}),
        **(engine_args or {}),
    }  # fmt: skip
    own = None
    if pg is None and _resources("cluster").get("GPU", 0):
        own = _group(num_engines, tensor_parallel_size, timeout)
    group = pg if own is None else own
    kind: Any = ray.remote(concurrency_groups=GROUPS)(grouped(LLMRayActor))  # type: ignore[call-overload]
    engines = []
    try:
        found = places(
            num_engines,
            tensor_parallel_size,
            None if group is None else placement_group_table(group)["bundles_to_node_id"],
            shared=own is None,
            gpus=gpus_per_engine,
        )
        for index, place in enumerate(found):
            where = {}
            if group is not None:
                where["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, place.bundle or 0, placement_group_capture_child_tasks=True
                )
            variables = {"env_vars": {**both_ends(os.environ), **(environment or {})}}
            configured = kind.options(max_restarts=max_restarts, runtime_env=variables, num_cpus=place.cpus, num_gpus=place.gpus, **where)
            start = partial(start_vllm, pretrain, seed=seed + index, **engine_arguments(arguments))
            engines.append(configured.remote(start, name=f"engine-{index}", **options))
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
    group: PlacementGroup = placement_group(bundles(num_engines, workers), strategy="PACK")
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
