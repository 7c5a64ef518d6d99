"""The engine of vLLM's RLHF examples: an `LLM` on Ray with two workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from engines import ARGUMENTS, SETTINGS, completion
from helpers.ray_fleet import environment
from models import PROMPTS, save, tiny
from vllm import LLM, SamplingParams

SOON = 120.0
STARTED = 400.0  # seconds until the engine answers
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)


class MyLLM(LLM):
    """The examples', which needs no GPU here."""


@contextmanager
def started(folder: Path, **arguments: Any) -> Iterator[Any]:
    """Its actor. It has loaded the weights of seed 2, which are written to `folder`. arguments: vLLM's."""
    save(tiny("qwen3", 2), folder)
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment(SETTINGS), logging_level="ERROR", log_to_driver=False)
    llm = ray.remote(num_cpus=0, num_gpus=0)(MyLLM).remote(model=str(folder), tensor_parallel_size=2, **ARGUMENTS, **arguments)
    ray.get(llm.reset_prefix_cache.remote(), timeout=STARTED)
    yield llm
    ray.kill(llm)
    ray.shutdown()


def generated(llm: Any) -> Any:
    """What it says to each prompt, with nothing kept in its caches."""
    ray.get(llm.reset_prefix_cache.remote(), timeout=SOON)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [completion(output) for output in ray.get(llm.generate.remote(prompts, SAMPLING, use_tqdm=False), timeout=SOON)]
