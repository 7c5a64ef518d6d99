"""An actor in a Ray actor. Its calls do not wait for each other: `generate` has a concurrency group, what a trainer asks has another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from instep.engine import CachePolicy
from instep.engine.serving import KVCacheInfo, ModelDims, Serving
from instep.extras import needed_by
from instep.generation.actor import LLMActor
from instep.generation.follower import Status
from instep.generation.manager import ActorStatus
from instep.generation.ray_metrics import ActorMetrics
from instep.generation.types import GenerationResult, PromptId, PromptRequest
from instep.generation.work import BEAT
from instep.protocol import Method

with needed_by("a fleet of actors"):
    import ray

GROUPS = {"control": 32, "generation": 4096}
"""Calls of one actor that may run at the same time, by group."""


UNSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Trainers tell Ray so to leave the choice of GPUs to them."""


def see_own_gpus(environment: MutableMapping[str, str], gpu_ids: Sequence[Any]) -> None:
    """Where Ray was told not to, restricts this process, and the workers that it starts, to the GPUs that Ray gave it."""
    if environment.get(UNSET, "0") not in ("", "0") and gpu_ids:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))


class LLMRayActor:
    """An `LLMActor` in a Ray actor. Arguments are the same; an actor that Ray has restarted takes no prompt before it has the weights."""

    name = "actor"  # Ray asks for the `repr` also where arguments could not be unpickled; one that fails hides why

    def __init__(self, start: Callable[[], Awaitable[Serving]], **options: Any) -> None:
        self.name = options.get("name", "actor")
        see_own_gpus(os.environ, ray.get_gpu_ids())
        if ray.get_runtime_context().was_current_actor_reconstructed:
            options["await_weights"] = True
        self.actor = LLMActor(start, observer=ActorMetrics(self.name), **options)

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

    @ray.method(concurrency_group="control")
    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes]:
        return await self.actor.commit_at_once(payload, caches, version)

    @ray.method(concurrency_group="control")
    async def init_process_group(self, *args: Any, **kwargs: Any) -> list[Status]:
        return await asyncio.to_thread(self.actor.init_process_group, *args, **kwargs)

    @ray.method(concurrency_group="control")
    async def update_weight(self, name: str, dtype: Any, shape: Sequence[int], empty_cache: bool = False) -> list[Status]:
        return await asyncio.to_thread(self.actor.update_weight, name, dtype, shape, empty_cache)

    @ray.method(concurrency_group="control")
    async def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Sequence[int], ipc_handles: dict[str, Any] | None = None, empty_cache: bool = False
    ) -> list[Status]:
        return await asyncio.to_thread(self.actor.update_weight_cuda_ipc, name, dtype, shape, ipc_handles, empty_cache)
