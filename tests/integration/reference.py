"""Run as a program: what a vLLM that loads a checkpoint from disk generates, and what vLLM's own reload makes of it.

    python reference.py OUT CHECKPOINT...

In a process of its own, with the engine inside it: one import of vLLM serves all checkpoints.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from engines import Generated, greedy, start
from models import PROMPTS

from instep import WeightSync
from instep.bench.subjects import stop_vllm


def main(out: str, *checkpoints: str) -> None:
    """`checkpoints` come in pairs: two of each family. The first pair is of the family with a tied head.
    OUT has the results by the names of their folders."""
    results: dict[str, dict[str, Generated]] = {}
    for first, second in zip(checkpoints[::2], checkpoints[1::2], strict=True):
        fresh, reloaded = generated(second, then=lambda llm, folder=first: stock_reload(llm, folder))
        results[first] = {"fresh": generated(first)[0], "stock_reload": reloaded}
        results[second] = {"fresh": fresh}
    with packed_heads():
        first, second = checkpoints[:2]
        results[first]["packed_fresh"] = generated(first)[0]
        results[first]["packed_stock_reload"] = generated(second, then=lambda llm: stock_reload(llm, first))[1]
        results[first]["packed_push"] = generated(second, then=lambda llm: push(llm, first))[1]
    Path(out).write_text(json.dumps({Path(folder).name: found for folder, found in results.items()}))


def generated(folder: str, then: Callable[[Any], None] = lambda llm: None) -> tuple[Generated, Generated]:
    """What an engine that loaded `folder` generates, and what it generates after `then` was done to it."""
    gc.freeze()  # engines collect garbage when they start and when they end, and what is there by now stays: half the time
    llm = start(Path(folder), load_format="auto")
    try:
        fresh = greedy(llm, PROMPTS)
        then(llm)
        return fresh, greedy(llm, PROMPTS)
    finally:
        stop_vllm(llm)


def stock_reload(llm: Any, folder: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    llm.reset_prefix_cache()


def push(llm: Any, folder: str) -> None:
    with WeightSync(source=folder, engines=[llm]) as sync:
        sync.push("packed")


@contextmanager
def packed_heads() -> Iterator[None]:
    """As on CPUs whose kernels want packed weights: the head of a model keeps a copy of its own. Whether this machine is one of them
    must not decide what the test sees."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def pack(_: Any, layer: torch.nn.Module) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)

    original = UnquantizedEmbeddingMethod.process_weights_after_loading
    UnquantizedEmbeddingMethod.process_weights_after_loading = pack
    try:
        yield
    finally:
        UnquantizedEmbeddingMethod.process_weights_after_loading = original


if __name__ == "__main__":
    main(*sys.argv[1:])
