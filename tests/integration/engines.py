"""Real vLLM engines for the tests, and what they generate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",  # models this small wait longer for a second thread than they gain from it
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles its sampler at the first token: seconds, and it dies where there is no C++ compiler
}
ARGUMENTS: dict[str, Any] = {"enforce_eager": True, "max_model_len": 96, "max_num_seqs": 8, "skip_tokenizer_init": True}
EXTENSION = "instep.engine.vllm_worker.WorkerExtension"

Generated = list[tuple[list[int], list[float]]]
AMX = torch.cpu._is_amx_tile_supported()
"""Where a processor has it, vLLM packs linear layers for it and keeps no plain weights of them."""


def start(folder: Path, **arguments: Any) -> Any:
    """An `LLM` with random weights of its own (`load_format="dummy"`), unless the arguments say otherwise."""
    with settings():
        from vllm import LLM

        return LLM(str(folder), **{"load_format": "dummy", "worker_extension_cls": EXTENSION, **ARGUMENTS, **arguments})


@contextmanager
def settings() -> Iterator[None]:
    """What engines that start within it inherit; other tests of this process do not see it."""
    before = dict(os.environ)
    os.environ.update(SETTINGS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def greedy(llm: Any, prompts: list[list[int]], max_tokens: int = 12, lora: Any = None) -> Generated:
    """Greedy tokens and their log-probabilities. lora: a `LoRARequest`."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False, lora_request=lora)
    return [completion(output) for output in outputs]


def completion(output: Any) -> tuple[list[int], list[float]]:
    tokens = list(output.outputs[0].token_ids)
    return tokens, [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)]


def versions(llm: Any, prompt: list[int]) -> list[tuple[str, int, int]]:
    from vllm import SamplingParams

    output = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=3, temperature=0.0, detokenize=False), use_tqdm=False)[
        0
    ]
    return [(span.version, span.start, span.end) for span in output.outputs[0].weight_versions]
