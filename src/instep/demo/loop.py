"""The story of the demo: a language model learns while a live engine follows it. Read this file
from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from instep import WeightSync
from instep.demo import ModelName, grpo, model, task
from instep.demo.engine import Engines, start
from instep.demo.grpo import Group
from instep.demo.picture import draw
from instep.demo.record import Answer, Exam, Run, Step, processor, versions
from instep.demo.show import Show, terminal
from instep.demo.task import Task

NAMES = {"smollm2": "SmolLM2-135M-Instruct", "tiny": "a tiny random Qwen3"}

Start = Callable[[Path, Task, int, Show], AbstractContextManager[Engines]]
"""Starts engines with a checkpoint's weights. Takes the lesson and the seed too."""


def demo(name: ModelName, steps: int, seed: int, out: Path, json: bool, start: Start) -> int:
    """See `instep.demo.run`."""
    out.mkdir(parents=True, exist_ok=True)
    with terminal(out / "engine.log", stderr=json) as console, Show(console) as show, TemporaryDirectory() as scratch:
        run = learn(name, steps, seed, Path(scratch), show, start)
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

    show.doing("starting")
    with start(checkpoint, lesson, seed, show) as engines:
        show.say(f"engine:  {engines.name}, started in {time.perf_counter() - began:.0f} s")
        show.say(f"reward:  {lesson.reward}")
        with WeightSync(source=trainer, engines=engines.engines, canary=lesson.canary) as sync:
            show.doing("asking questions that are never trained on")
            before = examine(engines, lesson, sync, 0)
            show.exam("before", before)

            started = time.perf_counter()
            record = train(trainer, engines, sync, lesson, steps, show)
            ended = time.perf_counter()

            show.doing("asking the questions that were never trained on once more")
            after = examine(engines, lesson, sync, 1)
            show.exam("after", after)
    seconds = {"start": started - began, "steps": ended - started, "total": time.perf_counter() - began}
    return Run(NAMES[name], engines.name, processor(), versions(), seed, lesson.reward, before, after, record, seconds)


def prepare(name: ModelName, seed: int, scratch: Path) -> tuple[Path, Task]:
    if name == "smollm2":
        checkpoint = model.smollm2()
        return checkpoint, task.capitals(checkpoint)
    return model.tiny(scratch, seed), task.small_tokens(vocabulary=256, seed=seed)


def train(trainer: Any, engines: Engines, sync: WeightSync, lesson: Task, steps: int, show: Show) -> list[Step]:
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=lesson.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    sampled = engines.batches(sync, steps)
    record: list[Step] = []
    show.header()
    t0 = time.perf_counter()
    for step in range(1, steps + 1):
        show.doing(f"step {step} of {steps}: the engine generates")
        groups, sampled_from = next(sampled)

        show.doing(f"step {step} of {steps}: the trainer learns")
        t1 = time.perf_counter()
        loss = update(trainer, optimizer, groups)
        t2 = time.perf_counter()

        show.doing(f"step {step} of {steps}: the engine takes over the new weights")
        receipt = sync.push(version=f"step-{step}")
        t3 = time.perf_counter()

        rewards = [mean(group.rewards) for group in groups]
        tokens = sum(len(completion) for group in groups for completion in group.completions)
        generating = (t3 if engines.ahead else t1) - t0
        record.append(Step(step, sampled_from, mean(rewards), rewards, tokens, generating, t2 - t1, loss, receipt.as_dict()))
        show.row(record[-1])
        t0 = t3
    return record


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


def examine(engines: Engines, lesson: Task, sync: WeightSync, round: int) -> Exam:
    groups = engines.exam(sync, round)
    answers = [
        Answer(question.text, lesson.read(group.completions[0]), group.rewards[0])
        for question, group in zip(lesson.held_out, groups, strict=True)
    ]
    return Exam(mean(mean(group.rewards) for group in groups), answers)
