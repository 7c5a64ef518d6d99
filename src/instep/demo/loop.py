"""The story of the demo: a language model learns while a live engine follows it. Read this file
from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from instep import WeightSync
from instep.demo import ModelName, grpo, model, task
from instep.demo.engine import Generate, Running, has_vllm, start
from instep.demo.grpo import Group
from instep.demo.picture import draw
from instep.demo.record import Answer, Exam, Run, Step, processor, versions
from instep.demo.show import Show, terminal
from instep.demo.task import Question, Task

EXAM_SAMPLES = 4
NAMES = {"smollm2": "SmolLM2-135M-Instruct", "tiny": "a tiny random Qwen3"}


Start = Callable[[Path, Task], Running]
Learn = Callable[[ModelName, int, int, Path, Show], Run]


def demo(name: ModelName, steps: int, seed: int, out: Path, json: bool, learn: Learn) -> int:
    """See `instep.demo.run`."""
    out.mkdir(parents=True, exist_ok=True)
    with terminal(out / "engine.log", stderr=json) as console, Show(console) as show, TemporaryDirectory() as scratch:
        run = learn(name, steps, seed, Path(scratch), show)
        show.doing("drawing")
        run.save(out / "demo.json")
        draw(run, out / "demo.png")
        show.say(run.verdict(), "bold")
        show.say(f"picture {out / 'demo.png'}, log {out / 'demo.json'}, {run.seconds['total']:.0f} s in all")
    if json:
        print((out / "demo.json").read_text(), end="")
    return 0


def learn(name: ModelName, steps: int, seed: int, scratch: Path, show: Show, start: Start = start) -> Run:
    began = time.perf_counter()
    show.say(f"trainer: {NAMES[name]}, float32, GRPO and AdamW, on {processor()}")
    show.doing("loading the model (the first time it is converted, which takes most of a minute)")
    checkpoint, lesson = prepare(name, seed, scratch)
    trainer = model.load(checkpoint)

    show.say(f"engine:  starting {'vLLM, about a minute' if has_vllm() else 'the embedded transformers engine: vLLM is not installed'}")
    show.doing("starting the engine")
    running = start(checkpoint, lesson)
    show.say(f"engine:  {running.name}, started in {time.perf_counter() - began:.0f} s")
    show.say(f"reward:  {lesson.reward}")

    show.doing("asking questions that are never trained on")
    before = examine(running.generate, lesson, seed)
    show.exam("before", before)

    started = time.perf_counter()
    with WeightSync(source=trainer, engines=[running.engine], canary=lesson.canary) as sync:
        record = train(trainer, running.generate, sync, lesson, steps, seed, show)
    ended = time.perf_counter()

    show.doing("asking the questions that were never trained on once more")
    after = examine(running.generate, lesson, seed)
    show.exam("after", after)
    seconds = {"start": started - began, "steps": ended - started, "total": time.perf_counter() - began}
    return Run(NAMES[name], running.name, processor(), versions(), seed, lesson.reward, before, after, record, seconds)


def prepare(name: ModelName, seed: int, scratch: Path) -> tuple[Path, Task]:
    if name == "smollm2":
        checkpoint = model.smollm2()
        return checkpoint, task.capitals(checkpoint)
    return model.tiny(scratch, seed), task.small_tokens(vocabulary=256, seed=seed)


def train(trainer: Any, generate: Generate, sync: WeightSync, lesson: Task, steps: int, seed: int, show: Show) -> list[Step]:
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=lesson.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    questions = task.batches(lesson.questions, lesson.batch, seed)
    record: list[Step] = []
    show.header()
    for step in range(1, steps + 1):
        show.doing(f"step {step} of {steps}: the engine generates")
        t0 = time.perf_counter()
        groups, sampled_from = sample(generate, lesson, next(questions), seed=1_000_000 * seed + 1_000 * step)

        show.doing(f"step {step} of {steps}: the trainer learns")
        t1 = time.perf_counter()
        loss = update(trainer, optimizer, groups)
        t2 = time.perf_counter()

        show.doing(f"step {step} of {steps}: the engine takes over the new weights")
        receipt = sync.push(version=f"step-{step}")

        rewards = [mean(group.rewards) for group in groups]
        tokens = sum(len(completion) for group in groups for completion in group.completions)
        record.append(Step(step, sampled_from, mean(rewards), rewards, tokens, t1 - t0, t2 - t1, loss, receipt.as_dict()))
        show.row(record[-1])
    return record


def sample(generate: Generate, lesson: Task, questions: Sequence[Question], seed: int) -> tuple[list[Group], list[str]]:
    """Returns a group of graded completions for each question, and the versions of the weights
    that sampled them."""
    answers = generate([question.prompt for question in questions], lesson.samples, seed)
    groups = [
        Group(
            prompt=question.prompt,
            completions=[completion.token_ids for completion in completions],
            logprobs=[completion.logprobs for completion in completions],
            rewards=[lesson.grade(question, completion.token_ids) for completion in completions],
        )
        for question, completions in zip(questions, answers, strict=True)
    ]
    return groups, sorted({completion.weight_version or "unlabelled" for completions in answers for completion in completions})


def update(trainer: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> float | None:
    """Makes one optimizer step. Returns the loss, or None if the rewards within every group are
    equal."""
    groups = [group for group in groups if group.teaches]
    if not groups:
        return None
    batch = grpo.pack(groups)
    loss = grpo.loss(grpo.token_logprobs(trainer, batch), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def examine(generate: Generate, lesson: Task, seed: int) -> Exam:
    replies = generate([question.prompt for question in lesson.held_out], EXAM_SAMPLES, seed)
    grades = [[lesson.grade(q, reply.token_ids) for reply in group] for q, group in zip(lesson.held_out, replies, strict=True)]
    first = zip(lesson.held_out, replies, grades, strict=True)
    answers = [Answer(question.text, lesson.read(group[0].token_ids), grade[0]) for question, group, grade in first]
    return Exam(mean(map(mean, grades)), answers)
