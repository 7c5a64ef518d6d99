"""The demo's engine: vLLM as any user would start it, or a transformers model in this process if
vLLM is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from instep import WeightSync
from instep.demo.grpo import Group
from instep.demo.model import load
from instep.demo.show import Show
from instep.demo.task import EXAM_SAMPLES, Question, Task, batches
from instep.engine.transformers import Completion, TransformersEngine
from instep.errors import ConfigError

Generate = Callable[[Sequence[list[int]], int, int], list[list[Completion]]]
"""Takes prompts, the number of samples for each, and a seed. Gives each prompt's completions,
sampled at temperature 1."""
Sampled = tuple[list[Group], list[str]]
"""A group of graded completions for each question, and the versions of the weights that sampled
them."""


class Engines(Protocol):
    """The engines of a run: they answer questions, and follow the trainer.

    engines: what a `WeightSync` takes. ahead: whether they answer while the trainer learns.
    """

    name: str
    engines: list[Any]
    ahead: bool

    def batches(self, sync: WeightSync, steps: int) -> Iterator[Sampled]:
        """Yields the answers to the questions of each step."""

    def exam(self, sync: WeightSync, round: int) -> list[Group]:
        """Returns the answers to the questions that are never trained on, in order. round: 0
        before the first step."""


@dataclass
class OneEngine:
    """An engine that is asked step by step, and waits while the trainer learns."""

    name: str
    engines: list[Any]
    generate: Generate
    lesson: Task
    seed: int
    ahead: bool = False

    def batches(self, sync: WeightSync, steps: int) -> Iterator[Sampled]:  # noqa: ARG002
        questions = batches(self.lesson.questions, self.lesson.batch, self.seed)
        for step in range(1, steps + 1):
            yield self._sample(next(questions), self.lesson.samples, 1_000_000 * self.seed + 1_000 * step)

    def exam(self, sync: WeightSync, round: int) -> list[Group]:  # noqa: ARG002
        return self._sample(self.lesson.held_out, EXAM_SAMPLES, self.seed)[0]

    def _sample(self, questions: Sequence[Question], samples: int, seed: int) -> Sampled:
        answers = self.generate([question.prompt for question in questions], samples, seed)
        groups = [
            Group(
                prompt=question.prompt,
                completions=[completion.token_ids for completion in completions],
                logprobs=[completion.logprobs for completion in completions],
                rewards=[self.lesson.grade(question, completion.token_ids) for completion in completions],
            )
            for question, completions in zip(questions, answers, strict=True)
        ]
        versions = {completion.weight_version for completions in answers for completion in completions}
        return groups, sorted(version or "unlabelled" for version in versions)


@contextmanager
def start(checkpoint: Path, lesson: Task, seed: int, show: Show) -> Iterator[Engines]:
    """Starts the engine. Raises `ConfigError` if vLLM is installed and does not start."""
    has_vllm = find_spec("vllm") is not None
    what = "vLLM, about a minute" if has_vllm else "the embedded transformers engine: vLLM is not installed"
    show.say(f"engine:  starting {what}")
    try:
        name, engine, generate = (start_vllm if has_vllm else start_embedded)(checkpoint, lesson)
    except Exception as error:
        raise ConfigError(f"the engine did not start: {error}", next_step="read engine.log in the output directory") from error
    yield OneEngine(name, [engine], generate, lesson, seed)


def start_vllm(checkpoint: Path, task: Task) -> tuple[str, Any, Generate]:
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

    return f"vLLM {vllm.__version__} ({current_platform.get_device_name()})", llm, generate


def completion(output: Any) -> Completion:
    """Converts an output of vLLM. The version is None in versions of vLLM that do not tell it."""
    token_ids = list(output.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, token_ids, strict=True)]
    spans = getattr(output, "weight_versions", None)
    return Completion(token_ids, logprobs, spans[-1].version if spans else None)


def start_embedded(checkpoint: Path, task: Task) -> tuple[str, Any, Generate]:
    engine = TransformersEngine(load(checkpoint))

    def generate(prompts: Sequence[list[int]], samples: int, seed: int) -> list[list[Completion]]:
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        completions = engine.generate(
            repeated, max_tokens=task.max_tokens, temperature=1.0, seed=seed, stop_token_ids=task.stop_token_ids
        )  # fmt: skip
        return [completions[first : first + samples] for first in range(0, len(completions), samples)]

    return "the embedded transformers engine", engine, generate
