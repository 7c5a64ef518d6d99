"""`loop.py` without waiting: two actors on Ray answer prompts, while the trainer takes results
as they come and pushes.

    prompts ──▶ two actors ──▶ results with rewards ──▶ trainer
                    ▲                                      │
                    └──────────── push, in flight ─────────┘

What is under way when a push comes goes on with the new weights; each token says which weights it came from.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from instep import WeightSync
from instep.demo import ModelName, model, task
from instep.demo.grpo import Group
from instep.demo.loop import EXAM_SAMPLES, NAMES, prepare, update
from instep.demo.record import Answer, Exam, Run, Step, processor, versions
from instep.demo.show import Column, Show
from instep.demo.task import Question, Task
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

    def __init__(self, checkpoint: Path, lesson: Task, seed: int) -> None:
        from instep.generation.ray.engines import RolloutQueues, create_vllm_engines

        self.lesson, self.seed = lesson, seed
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


def learn(name: ModelName, steps: int, seed: int, scratch: Path, show: Show) -> Run:
    """Learns as `loop.learn` does."""
    import ray

    began = time.perf_counter()
    show.say(f"trainer: {NAMES[name]}, float32, GRPO and AdamW, on {processor()}")
    show.doing("loading the model (the first time it is converted, which takes most of a minute)")
    checkpoint, lesson = prepare(name, seed, scratch)
    trainer = model.load(checkpoint)

    show.say(f"actors:  starting Ray and {ACTORS} actors with a vLLM each, about two minutes")
    show.doing("starting the actors")
    ray.init(num_cpus=ACTORS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        fleet = Fleet(checkpoint, lesson, seed)
        show.say(f"actors:  {ACTORS} are ready, after {time.perf_counter() - began:.0f} s")
        show.say(f"reward:  {lesson.reward}")
        with WeightSync(source=trainer, engines=fleet.engines, canary=lesson.canary) as sync:
            sync.push("step-0")
            before = examine(fleet, lesson, sync, 0)
            show.exam("before", before)
            started = time.perf_counter()
            record = list(train(trainer, fleet, sync, lesson, steps, seed, show))
            ended = time.perf_counter()
            after = examine(fleet, lesson, sync, 1)
            show.exam("after", after)
    finally:
        ray.shutdown()
    seconds = {"start": started - began, "steps": ended - started, "total": time.perf_counter() - began}
    engine = f"{ACTORS} actors on Ray {ray.__version__}"
    return Run(NAMES[name], engine, processor(), versions(), seed, lesson.reward, before, after, record, seconds)


def train(trainer: Any, fleet: Fleet, sync: WeightSync, lesson: Task, steps: int, seed: int, show: Show) -> Iterator[Step]:
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=lesson.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    questions = task.batches(lesson.questions, lesson.batch, seed)
    for round in range(min(AHEAD, steps)):
        fleet.ask("train", round, next(questions), lesson.samples)
    show.columns.insert(1, LAG)
    show.header()
    t0 = time.perf_counter()
    for step in range(1, steps + 1):
        show.doing(f"step {step} of {steps}: the trainer waits for results")
        results = fleet.answers("train", lesson.batch, sync)
        if step + AHEAD <= steps:
            fleet.ask("train", step + AHEAD - 1, next(questions), lesson.samples)

        show.doing(f"step {step} of {steps}: the trainer learns, the actors answer")
        t1 = time.perf_counter()
        groups = [group_of(result) for result in results]
        loss = update(trainer, optimizer, groups)
        t2 = time.perf_counter()

        show.doing(f"step {step} of {steps}: the actors take over the new weights, and go on")
        receipt = sync.push(version=f"step-{step}")

        rewards = [mean(group.rewards) for group in groups]
        samples = [sample for result in results for sample in result.samples]
        sampled_from = sorted({span.version for sample in samples for span in sample.versions})
        tokens, now = sum(len(sample.token_ids) for sample in samples), time.perf_counter()
        taken = Step(step, sampled_from, mean(rewards), rewards, tokens, now - t0, t2 - t1, loss, receipt.as_dict())
        t0 = now
        show.row(taken)
        yield taken


def group_of(result: GenerationResult) -> Group:
    samples = result.samples
    return Group(
        prompt=result.request.prompt_token_ids,
        completions=[sample.token_ids for sample in samples],
        logprobs=[sample.logprobs for sample in samples],
        rewards=[sample.reward.score if sample.reward else 0.0 for sample in samples],
    )


def examine(fleet: Fleet, lesson: Task, sync: WeightSync, round: int) -> Exam:
    fleet.ask("eval", round, lesson.held_out, EXAM_SAMPLES)
    results = sorted(fleet.answers("eval", len(lesson.held_out), sync), key=lambda result: result.request.index or 0)
    groups = [group_of(result) for result in results]
    answers = [
        Answer(question.text, lesson.read(group.completions[0]), group.rewards[0])
        for question, group in zip(lesson.held_out, groups, strict=True)
    ]
    return Exam(mean(mean(group.rewards) for group in groups), answers)
