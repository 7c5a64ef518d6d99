"""An `LLMActor` as a Ray actor. Its calls run concurrently."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any

from instep.engine.vllm.serving import start_vllm
from instep.extras import needed_by
from instep.generation.actor.actor import LLMActor
from instep.generation.actor.work import BEAT
from instep.generation.ray.arguments import OPTIONS, actor_options, engine_arguments
from instep.generation.ray.metrics import ActorMetrics

with needed_by("a fleet of actors"):
    import ray

GROUPS = {"control": 32, "generation": 4096}
"""Calls of one actor that may run at the same time, by group: see `grouped`."""
OF_GENERATION = ("generate", "until_over")
AT_ONCE = (
    "generate", "ready", "check_background_threads", "kv_cache_info", "get_kv_cache_info", "get_model_dims",
    "call", "pause", "resume", "label", "score", "refuse", "commit_at_once",
)  # fmt: skip
"""Methods of `LLMActor` that a `LLMRayActor` has too."""
IN_A_THREAD = (
    "cancel", "status", "reset_prefix_cache",
    "init_process_group", "update_weight", "update_weight_cuda_ipc", "finish_update",
)  # fmt: skip
"""Further ones, which block until the actor's event loop has answered."""

UNSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Trainers tell Ray so to leave the choice of GPUs to them."""


def see_own_gpus(environment: MutableMapping[str, str], gpu_ids: Sequence[Any], *, always: bool = False) -> None:
    """Restricts this process, and the workers that it starts, to the GPUs that Ray gave it, if
    Ray was told not to do so itself (see `UNSET`) or `always` is set."""
    if (always or environment.get(UNSET, "0") not in ("", "0")) and gpu_ids:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))


def see_bundles(environment: MutableMapping[str, str], indices: Sequence[int] | None, gpus: float) -> None:
    """Tells vLLM's Ray executor the bundles of its workers, and each worker's share of a GPU."""
    if indices is not None:
        environment["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, indices))
        environment["VLLM_RAY_PER_WORKER_GPUS"] = str(gpus)


def grouped(kind: type) -> type:
    """Returns the class with two concurrency groups, one for `generate` and one for a trainer's
    calls: neither waits for the other.

    Not of the class itself: `ray.remote` takes methods of groups only together with
    `concurrency_groups`.
    """
    methods = {name: _in_group(name, method) for name, method in vars(kind).items() if iscoroutinefunction(method)}
    return type(kind.__name__, (kind,), methods)


def _in_group(name: str, method: Callable[..., Awaitable[Any]]) -> Any:
    @wraps(method)
    async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await method(self, *args, **kwargs)

    return ray.method(concurrency_group="generation" if name in OF_GENERATION else "control")(forward)


class LLMRayActor:
    """An `LLMActor` in a Ray actor. After a restart by Ray it takes no prompt before it has the
    weights.

        remote = ray.remote(LLMRayActor).options(num_gpus=1)
        actor = remote.remote("model", prompt_queue=prompts, results_queue=results)

    args, kwargs: the model and vLLM's own arguments. Those of `LLMActor` among the named ones, and
        those below, are the actor's. A function that starts an engine, in the place of the model,
        leaves none to vLLM.
    tool_actors: handles of Ray actors with `safe_execute`, Open Instruct's tools.
    tool_parser_type: `legacy` (`<name>...</name>`), `dr_tulu`, or `vllm_NAME` with a tool parser of
    vLLM's.
    bundle_indices: bundles of the placement group for workers that vLLM places with Ray
    (`distributed_executor_backend="ray"`).
    reward_config: a `RewardConfig`, or Open Instruct's.
    train_dataset, eval_dataset: their rows, by `index`, have the labels of prompts.

    Raises `ConfigError` for what cannot be honoured, before the engine is started;
    `create_vllm_engines` does before any process is.
    """

    name = "actor"  # Ray asks for the `repr` also where arguments could not be unpickled; one that fails hides why

    def __init__(
        self,
        *args: Any,
        name: str = "actor",
        http: bool = True,
        bundle_indices: Sequence[int] | None = None,
        num_gpus: float = 1,
        noset_visible_devices: bool = False,
        **kwargs: Any,
    ) -> None:
        self.name = name
        if args and callable(args[0]):
            start, options = args[0], kwargs
        else:
            options = {key: kwargs.pop(key) for key in OPTIONS & kwargs.keys() if key != "tokenizer" or not isinstance(kwargs[key], str)}
            see_bundles(os.environ, bundle_indices, num_gpus)
            start = partial(start_vllm, *args, **engine_arguments(kwargs))
        see_own_gpus(os.environ, ray.get_gpu_ids(), always=noset_visible_devices)
        options = actor_options(name=name, http=http, **options)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            options["await_weights"] = True
        self.actor = LLMActor(start, observer=ActorMetrics(self.name), **options)
        gc.collect()
        gc.freeze()  # a full collection looks at all of vLLM, and stops the event loop for 0.3 s meanwhile

    def __repr__(self) -> str:
        return f"LLMRayActor({self.name})"

    async def until_over(self, worker: str) -> None:
        """Returns when this actor does not work in that worker process any more: it was
        restarted, has failed or was stopped."""
        while worker == ray.get_runtime_context().get_worker_id() and self.actor.works():  # noqa: ASYNC110
            await asyncio.sleep(BEAT)

    async def url(self) -> str | None:
        return self.actor.url

    async def stop(self, drain: bool = True, timeout: float = 60.0) -> list[Any]:  # noqa: ASYNC109
        return await asyncio.to_thread(self.actor.stop, drain=drain, timeout=timeout)


def _forwarded(name: str) -> Any:
    """Returns a method that calls the one of this name of the `LLMActor`."""
    method = getattr(LLMActor, name)

    @wraps(method)
    async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self.actor, name)
        if name in IN_A_THREAD:
            return await asyncio.to_thread(call, *args, **kwargs)
        found = call(*args, **kwargs)
        return await found if iscoroutinefunction(method) else found

    return forward


for _name in (*AT_ONCE, *IN_A_THREAD):
    setattr(LLMRayActor, _name, _forwarded(_name))
