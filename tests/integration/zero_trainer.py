"""What `sharded_trainer.py` does with a DeepSpeed trainer and Open Instruct's names: brings the vLLM of rank 0 to its weights with ZeRO 0,
2 and 3."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from dropins import free_port, in_thread
from engines import greedy
from models import PROMPTS, tiny

from instep.dropin.open_instruct import broadcast_weights_to_vllm, init_process_group

WAYS = [(0, True, 2), (3, True, 3), (3, False, 2), (2, True, 3)]
"""ZeRO stage, whether the model is gathered whole, and the seed of the weights."""


def broadcasts(deepspeed: Any, llm: Any, family: str) -> dict[str, Any]:
    """llm: None on other ranks than the first."""
    group = join(llm) if llm is not None else None
    results: dict[str, Any] = {"generated": [], "errors": []}
    for stage, whole, seed in WAYS:
        model = zero(deepspeed, tiny(family, seed), stage)
        assert broadcast_weights_to_vllm(model, [llm], group, stage, whole, timeout=60) == []
        if llm is not None:
            results["generated"].append(greedy(llm, PROMPTS))
        if stage == 3:
            results["errors"].append(failure(model, llm, group, whole))
            broadcast_weights_to_vllm(model, [llm], group, stage, whole, timeout=60)  # by the same group
    return results


def join(llm: Any) -> Any:
    port = free_port()
    joining = in_thread(llm.collective_rpc, "init_process_group", args=("127.0.0.1", port, 1, 2, "openrlhf", "gloo"))
    group = init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="openrlhf")
    joining.result(60)
    return group


def zero(deepspeed: Any, model: Any, stage: int) -> Any:
    """The module, once DeepSpeed has made its engine of it and trained it by nothing."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    tokens = torch.tensor([PROMPTS[0]])
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    return engine.module


def failure(model: Any, llm: Any, group: Any, whole: bool) -> str:
    """What a rank is told when another engine fails at the third tensor."""
    calls = []

    def update_weight(**announced: Any) -> Any:
        calls.append(announced)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return [{"ok": True, "error": None, "rank": 0, "version": None, "committed": False, "dirty": None}]

    try:
        broadcast_weights_to_vllm(model, [llm, SimpleNamespace(update_weight=update_weight)], group, 3, whole, timeout=60)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
