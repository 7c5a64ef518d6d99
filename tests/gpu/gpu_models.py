"""Models and engines for the GPU tests and the GPU benchmark. Nothing here needs a download."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

EXTENSION = "instep.engine.vllm_worker.WorkerExtension"

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip


def config(shapes: str) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SHAPES[shapes], max_position_embeddings=1024, torch_dtype="bfloat16", architectures=["Qwen3ForCausalLM"])


def folder(shapes: str) -> Path:
    """A checkpoint directory with a configuration and no weights."""
    path = Path(tempfile.mkdtemp(prefix=f"instep-{shapes}-"))
    config(shapes).save_pretrained(path)
    return path


def model(shapes: str, seed: int, device: str) -> Any:
    """Random weights, large enough for greedy tokens to depend on them."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        made = Qwen3ForCausalLM._from_config(config(shapes), dtype=torch.bfloat16)
    with torch.no_grad():
        for param in made.parameters():
            if param.ndim > 1:
                param.normal_(0.0, 0.08 if shapes == "tiny" else 0.02)
    return made


@contextmanager
def visible(devices: str | None) -> Iterator[None]:
    """What processes that start now see of the GPUs."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        yield
    finally:
        if devices is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


def start(path: Path, devices: str | None = None, **arguments: Any) -> Any:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    settings = {
        "load_format": "dummy", "max_model_len": 512, "max_num_seqs": 8, "gpu_memory_utilization": 0.4, "skip_tokenizer_init": True,
        "worker_extension_cls": EXTENSION, "enforce_eager": True,
    }  # fmt: skip
    torch.cuda.init()  # before the mask changes: this process goes on seeing all GPUs
    with visible(devices):
        return LLM(str(path), **{**settings, **arguments})


def greedy(llm: Any, prompts: list[list[int]], tokens: int = 12) -> list[tuple[list[int], list[float]]]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [
        (list(o.outputs[0].token_ids), [e[t].logprob for e, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)])
        for o in outputs
    ]
