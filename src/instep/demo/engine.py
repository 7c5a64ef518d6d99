"""The demo's engine: vLLM as any user would start it, or a transformers model in this process if
vLLM is not installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from instep.demo.model import load
from instep.demo.task import Task
from instep.engine.transformers import Completion, TransformersEngine
from instep.errors import ConfigError

Generate = Callable[[Sequence[list[int]], int, int], list[list[Completion]]]
"""Takes prompts, the number of samples for each, and a seed. Gives each prompt's completions, sampled at temperature 1."""


@dataclass(frozen=True)
class Running:
    """A running engine. `engine` is what a `WeightSync` takes."""

    name: str
    engine: Any
    generate: Generate


def has_vllm() -> bool:
    return find_spec("vllm") is not None


def start(checkpoint: Path, task: Task) -> Running:
    """Starts the engine. Raises `ConfigError` if vLLM is installed and does not start."""
    if not has_vllm():
        return start_embedded(checkpoint, task)
    try:
        return start_vllm(checkpoint, task)
    except Exception as error:
        raise ConfigError(f"vLLM did not start: {error}", next_step="read engine.log in the output directory") from error


def start_vllm(checkpoint: Path, task: Task) -> Running:
    import vllm
    from vllm.platforms import current_platform

    llm = vllm.LLM(
        model=str(checkpoint),
        worker_extension_cls="instep.vllm.WorkerExtension",  # all that instep needs
        dtype="float32",  # what the trainer has; CPUs without bfloat16 instructions are also four times faster with it
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=task.batch * task.samples,
        block_size=32,
        kv_cache_memory_bytes=1 << 28,
    )

    def generate(prompts: Sequence[list[int]], samples: int, seed: int) -> list[list[Completion]]:
        params = [
            vllm.SamplingParams(
                n=samples, temperature=1.0, max_tokens=task.max_tokens, stop_token_ids=task.stop_token_ids,
                ignore_eos=True, logprobs=0, detokenize=False, seed=seed + index * samples,
            )
            for index in range(len(prompts))
        ]  # fmt: skip
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [[completion(output) for output in answer.outputs] for answer in answers]

    return Running(f"vLLM {vllm.__version__} ({current_platform.get_device_name()})", llm, generate)


def completion(output: Any) -> Completion:
    """Converts an output of vLLM. The version is None in versions of vLLM that do not tell it."""
    token_ids = list(output.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, token_ids, strict=True)]
    spans = getattr(output, "weight_versions", None)
    return Completion(token_ids, logprobs, spans[-1].version if spans else None)


def start_embedded(checkpoint: Path, task: Task) -> Running:
    engine = TransformersEngine(load(checkpoint))

    def generate(prompts: Sequence[list[int]], samples: int, seed: int) -> list[list[Completion]]:
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        completions = engine.generate(
            repeated, max_tokens=task.max_tokens, temperature=1.0, seed=seed, stop_token_ids=task.stop_token_ids
        )  # fmt: skip
        return [completions[first : first + samples] for first in range(0, len(completions), samples)]

    return Running("the embedded transformers engine", engine, generate)
