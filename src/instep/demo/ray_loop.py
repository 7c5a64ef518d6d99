"""Engines that answer while the trainer learns: two actors on Ray. The trainer takes results as
they come, and pushes.

    prompts ──▶ two actors ──▶ results with rewards ──▶ trainer
                    ▲                                      │
                    └──────────── push, in flight ─────────┘

What is under way when a push comes goes on with the new weights; each token says which weights it
came from.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep import WeightSync
from instep.demo.engine import Sampled
from instep.demo.grpo import Group
from instep.demo.record import Step
from instep.demo.show import Column, Show
from instep.demo.task import EXAM_SAMPLES, Question, Task, batches
from instep.errors import EngineTimeout, SyncError
from instep.generation import Label, PromptId, PromptRequest, RewardConfig, Sampling
from instep.generation.types import GenerationResult, Split

ACTORS = 2
AHEAD = 2
"""Batches of prompts that are under way or wait."""
PATIENCE = 300.0
"""Seconds in which a result must come."""
LAG = Column("lag", 3, lambda step: str(lag(step)))


def lag(step: Step) -> int:
    """Returns how many versions a step's oldest token is behind what the actors served when the
    trainer took it."""
    return step.step - 1 - min(int(version.removeprefix("step-")) for version in step.sampled_from)


@dataclass(frozen=True)
class Graded:
    """A verifier that gives the lesson's reward, for the actors."""

    grade: Callable[[Question, Sequence[int]], float]

    async def __call__(self, answer: Any, value: Any) -> float:
        return self.grade(value, answer.sample.token_ids)


class Numbers:
    """A tokenizer for a model without one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return " ".join(map(str, token_ids))


class Fleet:
    """The demo's actors, and the queues between them and the trainer."""

    ahead = True

    def __init__(self, name: str, checkpoint: Path, lesson: Task, seed: int) -> None:
        from instep.generation.ray.engines import RolloutQueues, create_vllm_engines

        self.name, self.lesson, self.seed = name, lesson, seed
        self.queues = RolloutQueues()
        self.engines = create_vllm_engines(
            ACTORS,
            pretrain=str(checkpoint),
            enforce_eager=True,
            max_model_len=64,
            max_restarts=1,
            prompt_queue=self.queues.prompts,
            results_queue=self.queues.results,
            eval_results_queue=self.queues.eval_results,
            reward_config=RewardConfig(verifiers={"lesson": Graded(lesson.grade)}, verification_reward=1.0),
            tokenizer=Numbers(),  # the lesson reads tokens
            engine_args={
                "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": lesson.batch * lesson.samples,
                "block_size": 32, "kv_cache_memory_bytes": 1 << 28,
            },
        )  # fmt: skip

    def batches(self, sync: WeightSync, steps: int) -> Iterator[Sampled]:
        questions = batches(self.lesson.questions, self.lesson.batch, self.seed)
        for round in range(min(AHEAD, steps)):
            self.ask("train", round, next(questions), self.lesson.samples)
        for step in range(1, steps + 1):
            results = self.answers("train", self.lesson.batch, sync)
            if step + AHEAD <= steps:
                self.ask("train", step + AHEAD - 1, next(questions), self.lesson.samples)
            spans = [span for result in results for sample in result.samples for span in sample.versions]
            yield [group_of(result) for result in results], sorted({span.version for span in spans})

    def exam(self, sync: WeightSync, round: int) -> list[Group]:
        if round == 0:
            sync.push("step-0")  # so that all tokens come from weights with the name of a step
        self.ask("eval", round, self.lesson.held_out, EXAM_SAMPLES)
        results = self.answers("eval", len(self.lesson.held_out), sync)
        return [group_of(result) for result in sorted(results, key=lambda result: result.request.index or 0)]

    def ask(self, split: Split, round: int, questions: Sequence[Question], samples: int) -> None:
        for index, question in enumerate(questions):
            sampling = Sampling(
                n=samples, max_tokens=self.lesson.max_tokens, stop_token_ids=tuple(self.lesson.stop_token_ids), ignore_eos=True,
                seed=1_000_000 * self.seed + 1_000 * round + samples * index,
            )  # fmt: skip
            id = PromptId(split, round, str(index))
            request = PromptRequest(
                id=id, prompt_token_ids=question.prompt, sampling=sampling, labels=(Label("lesson", question),), index=index
            )
            self.queues.prompts.put(request)

    def answers(self, split: Split, count: int, sync: WeightSync) -> list[GenerationResult]:
        """Returns the next results. Actors that Ray has restarted meanwhile get the weights."""
        results = self.queues.results if split == "train" else self.queues.eval_results
        found: list[GenerationResult] = []
        deadline = time.monotonic() + PATIENCE
        while len(found) < count:
            try:
                found.append(results.get(timeout=5.0))
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise EngineTimeout(f"{count - len(found)} results did not come within {PATIENCE:g} s") from None
                catch_up(sync)
        return found


def catch_up(sync: WeightSync) -> None:
    if any(state.version is None or state.serving != "old" for state in sync.status()):
        with suppress(SyncError):  # of an actor that does not answer yet
            sync.catch_up()


@contextmanager
def start(checkpoint: Path, lesson: Task, seed: int, show: Show) -> Iterator[Fleet]:
    import ray

    show.say(f"engine:  starting Ray and {ACTORS} actors with a vLLM each, about two minutes")
    show.columns.insert(1, LAG)
    ray.init(num_cpus=ACTORS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield Fleet(f"{ACTORS} actors on Ray {ray.__version__}", checkpoint, lesson, seed)
    finally:
        ray.shutdown()


def group_of(result: GenerationResult) -> Group:
    samples = result.samples
    return Group(
        prompt=result.request.prompt_token_ids,
        completions=[sample.token_ids for sample in samples],
        logprobs=[sample.logprobs for sample in samples],
        rewards=[sample.reward.score if sample.reward else 0.0 for sample in samples],
    )
