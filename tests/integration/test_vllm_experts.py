"""Expert parallelism over two workers: each takes the experts that its loader takes. vLLM's kernel for experts on CPUs does not know of
experts elsewhere and ends the process: what the workers hold is compared, bit for bit, with what they loaded from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from instep import WeightSync

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def llm(engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> Any:
    """Loaded from disk, with the weights of seed 2."""
    return engine(
        checkpoints("qwen3_moe", 2),
        load_format="auto",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        worker_extension_cls="summed.SummingExtension",
    )


def test_each_worker_takes_its_own_experts_and_all_are_taken(llm: Any) -> None:
    model, from_disk = tiny("qwen3_moe", 3), llm.collective_rpc("held")
    with WeightSync(source=model, engines=[llm]) as sync:
        sync.push("away")
        away = llm.collective_rpc("held")
        for rank, (now, before) in enumerate(zip(away, from_disk, strict=True)):
            moved = {name for name in now if now[name] != before[name]}
            assert {f"{EXPERTS}.routed_experts.w13_weight", f"{EXPERTS}.routed_experts.w2_weight"} <= moved, rank
            assert f"{EXPERTS}.routed_experts._expert_map" not in moved
        model.load_state_dict(tiny("qwen3_moe", 2).state_dict())
        for version in ("back", "again"):  # by the reload session, and by what it has proved
            sync.push(version)
            assert llm.collective_rpc("held") == from_disk
        plan = sync._session.fleet.members[0].plan
    assert plan is not None
    for rank, worker in enumerate(plan.workers):
        read = {route.tensor for route in worker.routes if route.tensor is not None and route.tensor.startswith(f"{EXPERTS}.")}
        assert read == {f"{EXPERTS}.{2 * rank + at}.{part}_proj.weight" for at in (0, 1) for part in ("gate", "up", "down")}
