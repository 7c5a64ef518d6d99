"""Engines for the GPU tests, of the benchmark's shapes. Nothing here needs a download."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from gpus import apart

from instep.bench import shapes
from instep.bench.shapes import model
from instep.bench.subjects import ENVIRONMENT, PROMPTS, greedy, stop_vllm
from instep.transport.group import environment

MEMORY = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
"""Not measured at the start, which fails where another process frees memory meanwhile."""
EXTENSION = "instep.vllm.WorkerExtension"

__all__ = ["EXTENSION", "MEMORY", "PROMPTS", "folder", "generated", "greedy", "model", "start", "stop_vllm", "visible"]


def folder(name: str) -> Path:
    """A checkpoint directory with a configuration and no weights."""
    return shapes.folder(name, Path(tempfile.mkdtemp(prefix=f"instep-{name}-")))


def visible(devices: str | None) -> AbstractContextManager[None]:
    """What processes that start now see of the GPUs."""
    return environment({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})


def start(path: Path, devices: str | None = None, **arguments: Any) -> Any:
    settings = {
        "load_format": "dummy", "max_model_len": 512, "max_num_seqs": 8, "skip_tokenizer_init": True, "worker_extension_cls": EXTENSION,
        "enforce_eager": True, **MEMORY,
    }  # fmt: skip
    torch.cuda.init()
    torch.cuda.device_count()  # PyTorch remembers it from now on: this process goes on seeing all GPUs when the mask changes
    with environment({**ENVIRONMENT, "VLLM_USE_FLASHINFER_SAMPLER": "0"}), visible(devices), apart():
        from vllm import LLM

        return LLM(str(path), **{**settings, **arguments})


def generated(llm: Any) -> Any:
    """What it says to each prompt, with nothing kept in its prefix cache."""
    llm.reset_prefix_cache()
    return greedy(llm, PROMPTS)
