"""Starts vLLM engines of one family, and records what they generate."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from instep.bench.models.families.family import Family
from instep.bench.subjects import ENVIRONMENT, ON_CPU, ON_GPU, greedy, stop_vllm

PROMPTS = [[5, 6, 7, 8, 9], list(range(11, 21)), list(range(20, 60))]
NEW_TOKENS = 8

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""vLLM forks its engines. A process that was forked from one whose OpenMP has threads waits for
ever when PyTorch first computes with several in host memory, as to read tensors back."""

Answer = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Look:
    """The state of one engine. answers: greedy tokens and their log-probabilities, one for each
    prompt. live: digests of its model's tensors, by worker and name."""

    answers: list[Answer]
    live: dict[str, str]

    @property
    def finite(self) -> bool:
        return all(math.isfinite(score) for _, scores in self.answers for score in scores)


def environment(gpu: int | None) -> dict[str, str]:
    """Returns the variables of a process that starts engines. gpu: the only one that it sees, or
    None for a CPU.

    On a CPU the engine lives in this process, as that starts sooner. On a GPU it has a process of
    its own, as a process cannot open CUDA memory that it has exported.
    """
    if gpu is None:
        return ENVIRONMENT | ON_CPU | ONE_THREAD | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return ENVIRONMENT | ON_GPU | ONE_THREAD | {"CUDA_VISIBLE_DEVICES": str(gpu)}


@contextmanager
def started(family: Family, folder: Path) -> Iterator[Any]:
    """Starts an `LLM` with the weights in `folder`, in bfloat16, and stops it at the end.

    vLLM imports a model's class in a process of its own to look at it, which takes longer than the
    engine takes to start. This process is there for one family alone, and imports it.
    """
    from vllm import LLM
    from vllm.model_executor.models import registry

    on_gpu = {
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.05,
        "additional_config": {"gdn_prefill_backend": "triton"},  # FlashInfer, the default, is not always there
    }
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": family.pictures is None,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "instep.bench.models.worker.FamilyWorker",
        **(on_gpu if torch.version.cuda else {}),
        **({"limit_mm_per_prompt": {"image": 1, "video": 0}} if family.pictures else {}),
    }
    gc.freeze()  # engines collect garbage when they start and end, and what is there by now stays
    with patch.object(registry, "_run_in_subprocess", lambda look: look()):
        llm = LLM(str(folder), **arguments)
    try:
        yield llm
    finally:
        stop_vllm(llm)


def look(llm: Any, family: Family) -> Look:
    """Records an engine's state. Prompts run one by one: sharing a step would change bits."""
    answers = [greedy(llm, [prompt], NEW_TOKENS)[0] for prompt in _prompts(family)]
    digests = llm.collective_rpc("live_digests")
    live = {f"{rank}:{name}": digest for rank, held in enumerate(digests) for name, digest in held.items()}
    return Look(answers, live)


def _prompts(family: Family) -> Iterator[Any]:
    yield from PROMPTS
    if family.pictures:
        image = [*family.pictures.prompt, *PROMPTS[0]]
        for seed in (1, 2):
            yield {"prompt_token_ids": image, "multi_modal_data": {"image": _image(seed)}}


def _image(seed: int) -> Any:
    """Returns a random RGB image of 28 x 28 pixels."""
    from PIL import Image

    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (28, 28, 3), dtype=torch.uint8, generator=random)
    return Image.fromarray(pixels.numpy())
