"""Engines with Open Instruct's names and defaults, over the actors of `instep.generation.ray`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from instep.generation.exchange.records import (
    GenerationResult,
    PromptRequest,
    RequestInfo,
    SamplingConfig,
    ShutdownSentinel,
    TokenStatistics,
    ToolCallStats,
)
from instep.generation.ray import engines as fleet
from instep.generation.ray.actor import LLMRayActor

__all__ = [
    "GenerationResult", "LLMRayActor", "PromptRequest", "RequestInfo", "SamplingConfig", "ShutdownSentinel", "TokenStatistics",
    "ToolCallStats", "create_vllm_engines",
]  # fmt: skip

DRAIN = 240.0
"""Seconds for turns to end before an update that is not in flight: `broadcast_weights_to_vllm`
waits longer for each tensor."""


def create_vllm_engines(
    num_engines: int,
    tensor_parallel_size: int,
    enforce_eager: bool,
    tokenizer_name_or_path: str,
    pretrain: str,
    revision: str | None,
    seed: int,
    enable_prefix_caching: bool,
    max_model_len: int,
    vllm_gpu_memory_utilization: float = 0.9,
    single_gpu_mode: bool = False,
    pg: Any = None,
    tool_actors: Sequence[Any] | None = None,
    tool_parser_type: str = "legacy",
    max_tool_calls: int = 5,
    mask_tool_use: bool = True,
    prompt_queue: Any = None,
    results_queue: Any = None,
    eval_results_queue: Any = None,
    actor_manager: Any = None,
    inflight_updates: bool = False,
    reward_config: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    vllm_dtype: str = "bfloat16",
    **options: Any,
) -> list[Any]:
    """Handles of `num_engines` actors that are ready.

    Arguments as `LLMRayActor` and `instep.generation.ray.create_vllm_engines` explain them, and
    raises what that raises. options: its further ones, such as `max_restarts` and `engine_args`.
    inflight_updates: if False, an update waits for turns under way, no longer than `drain_timeout`
    (240) seconds.
    """
    options.setdefault("drain_timeout", DRAIN)
    return fleet.create_vllm_engines(
        num_engines, tensor_parallel_size, enforce_eager, tokenizer_name_or_path, pretrain, revision, seed, enable_prefix_caching,
        max_model_len, vllm_gpu_memory_utilization, single_gpu_mode, pg, tool_actors=tool_actors, tool_parser_type=tool_parser_type,
        max_tool_calls=max_tool_calls, mask_tool_use=mask_tool_use, prompt_queue=prompt_queue, results_queue=results_queue,
        eval_results_queue=eval_results_queue, actor_manager=actor_manager, inflight_updates=inflight_updates,
        reward_config=reward_config, train_dataset=train_dataset, eval_dataset=eval_dataset, vllm_dtype=vllm_dtype, **options,
    )  # fmt: skip
