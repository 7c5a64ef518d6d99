"""Real vLLM engines for the tests, and what they generate."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
EXTENSION = "instep.vllm.WorkerExtension"
IMPORTED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    *(f"vllm.model_executor.models.{family}" for family in ("llama", "qwen3", "qwen3_moe")),
]
"""What an engine's processes need. To import it takes them longer than all else that they do to start."""

Generated = list[tuple[list[int], list[float]]]
AMX = torch.cpu._is_amx_tile_supported()
"""Where a processor has it, vLLM computes with kernels that round in another way."""


def keeps_plain_weights() -> bool:
    """Tell whether vLLM's linear layers still have their weights after it has loaded them. It drops
    them where it packs them for AMX or for oneDNN."""
    from vllm import _custom_ops

    return not (AMX or _custom_ops._supports_onednn)


def start(folder: Path, **arguments: Any) -> Any:
    """An `LLM` with random weights of its own (`load_format="dummy"`), unless the arguments say otherwise."""
    with settings():
        from vllm import LLM

        return LLM(str(folder), **{"load_format": "dummy", "worker_extension_cls": EXTENSION, **ARGUMENTS, **arguments})


@contextmanager
def settings() -> Iterator[None]:
    """What engines that start within it inherit; other tests of this process do not see it. Their
    processes are forked."""
    before = dict(os.environ)
    os.environ.update(SETTINGS)
    try:
        with forked():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def forked() -> Iterator[None]:
    """The processes of engines that start within it are forked from a process that has imported
    vLLM, once for all of them. vLLM's CPU platform would have each import it anew.

    The processes have the environment of the first engine, and the files that this process has
    open are not theirs: what one end closes is closed.
    """
    from vllm.v1.engine import utils

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    method = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}  # an engine's workers from the engine, as on a GPU
    with patch.dict(os.environ, method), patch.object(utils, "get_mp_context", lambda: context):
        forkserver.ensure_running()
        yield


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
