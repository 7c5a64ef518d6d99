"""Says what `instep plan` starts, and checks whether this machine has the memory for it."""

from __future__ import annotations

from collections import Counter

import torch

from instep.bench.subjects import ON_CPU, ROOM
from instep.cli.memory import free
from instep.errors import ConfigError

KV_CACHE = int(ON_CPU["VLLM_CPU_KVCACHE_SPACE"]) << 30
"""Bytes of each worker's KV cache."""
COPIES = 6
"""Copies of the weights: the trainer's, a version on its way, and the engine's, as they come, as
vLLM packs them, and what a first push holds of both. At the peak 5.8 (0.27 and 1.2 GB, vLLM 0.32,
2026-11-29)."""
PROCESSES = 1_200_000_000
"""Bytes that the trainer and vLLM's core take beside these, measured there too: PyTorch and vLLM."""
WORKER = 700_000_000
"""Bytes that each worker takes beside these, measured in the same way."""


def announced(name: str, nbytes: int, tp: int, gpus: int) -> str:
    """Returns a text about what will start. nbytes: of the model's weights. gpus: of this machine.

    Raises `ConfigError`, with both numbers, where it takes more memory than is free.
    """
    where = f"{tp} GPU{'s' * (tp > 1)}" if gpus else "the CPU"
    vllm = f"plan starts a real vLLM on {where}, with random weights of {name} ({_gb(nbytes)})"
    takes = _on_gpus(nbytes, tp, gpus) if gpus else _on_cpu(nbytes, tp)
    return f"{vllm}, and a trainer with as many beside it; about a minute, and both end with it\n{takes}"


def _on_cpu(nbytes: int, tp: int) -> str:
    need = COPIES * nbytes + tp * (KV_CACHE + WORKER) + PROCESSES
    parts = f"{COPIES} x {_gb(nbytes)} of weights, {_gb(tp * KV_CACHE)} of KV cache"
    parts += f", {_gb(tp * WORKER + PROCESSES)} for the processes"
    text, found = f"it needs about {_gb(need)} of memory ({parts})", free()
    if found is None:
        return text
    _refuse(text, need, found.nbytes, found.limit)
    return f"{text}; {_gb(found.nbytes)} are free"


def _on_gpus(nbytes: int, tp: int, gpus: int) -> str:
    need = Counter(dict.fromkeys(range(tp), nbytes // tp + ROOM)) + Counter({gpus - 1: nbytes})
    parts = {gpu: f"{_gb(wanted)} of GPU {gpu}" for gpu, wanted in need.items()}
    for gpu, part in parts.items():
        left = torch.cuda.mem_get_info(gpu)[0]
        _refuse(f"it needs about {part}", need[gpu], left, "that GPU's memory")
    return "it needs about " + ", ".join(parts.values())


def _refuse(text: str, need: int, free: int, limit: str) -> None:
    if need > free:
        raise ConfigError(
            f"plan would start a vLLM here: {text}, and {_gb(free)} are free ({limit})",
            next_step="run it where there is more, or end what takes it",
        )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
