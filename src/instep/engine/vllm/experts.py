"""Checks where a vLLM keeps the experts of an MoE model, and whether a push can follow.

Routes are traced in each worker through its own loader, which knows the experts that the worker
has: expert parallelism needs nothing else, and the proof wants each expert read by some worker. Two
things break this.

vLLM's load balancing (`enable_eplb`) moves experts between workers while it serves. Its loader goes
on to fill the places of the first arrangement, and its router asks the places of the present one.
An arrangement that is under way also brings experts of before the push.

Data-parallel ranks of a mixture hold a part of its experts each, or of every expert. One that was
started alone is not all of the engine.
"""

from __future__ import annotations

from typing import Any

from instep.errors import PlanError

STATIC = (
    "no engine was touched: start the engine without enable_eplb (and without redundant experts). Expert parallelism itself, "
    "enable_expert_parallel=True, is followed"
)

TOGETHER = "start all ranks as one engine: one AsyncLLM(data_parallel_size=...), or one `instep serve` with --data-parallel-size"


def check_experts_stay(config: Any) -> None:
    """Raises `PlanError` if a vLLM with this configuration moves experts between its workers
    while it serves."""
    if getattr(config.parallel_config, "enable_eplb", False):
        raise PlanError(
            "vLLM's load balancing of experts (enable_eplb) moves them between workers while it serves, and its loader does not follow: "
            "after a move a push would bring experts to places from which other experts are served",
            next_step=STATIC,
        )


def apart(config: Any, client: Any) -> str | None:
    """Why this engine is only a part of one, or None. client: the `engine_core` of an
    `LLMEngine` or an `AsyncLLM`."""
    replicas = len(getattr(client, "core_engines", ())) or 1
    parallel = config.parallel_config
    ranks: int = getattr(parallel, "data_parallel_size", 1)
    if replicas >= ranks:
        return None
    mixture = getattr(parallel, "is_moe_model", None)
    if not (getattr(config.model_config, "is_moe", False) if mixture is None else mixture):
        return None
    return f"this vLLM has {replicas} of the {ranks} data-parallel ranks over which a mixture's experts are spread"
