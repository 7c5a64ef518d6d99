"""Runs the benchmark from beginning to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import torch

from instep.bench.copies import copies, digest_alone
from instep.bench.fsdp2 import Fsdp2Trainer
from instep.bench.limits import broadcast_limits, copy_limit, messages
from instep.bench.machine import setting
from instep.bench.measure import Bench, failed
from instep.bench.memory import trim
from instep.bench.report import rate, size, time
from instep.bench.results import Copy, Limit, Results, Row, TrainerKind
from instep.bench.stages import Stage, stages
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.bench.waits import Late, bounded
from instep.engine import connect
from instep.errors import ConfigError

CALLS = 25
IDLE = 0.02
"""Seconds before each: a push too calls processes that have waited, and whose cores may sleep."""


class Benchmark:
    """One run of the benchmark. say: called with each result as it comes. kind: of the trainer.
    Raises `ConfigError` if the machine has no room for it."""

    def __init__(self, shapes: str, repeats: int, say: Callable[[str], object], kind: TrainerKind = "plain") -> None:
        self.shapes, self.repeats, self.say = shapes, repeats, say
        self.devices = [f"cuda:{device}" for device in range(min(2, torch.cuda.device_count()))] or ["cpu"]
        say(f"making random weights of {shapes} on {self.devices[0]}")
        self.trainer = self.make(kind)
        self.setting = setting(shapes, self.trainer, repeats, kind)
        self.limits: list[Limit] = []
        self.rows: list[Row] = []
        self.copies: list[Copy] = []
        self.calls: dict[str, dict[str, float]] = {}
        self.notes: list[str] = []

    def make(self, kind: TrainerKind) -> Trainer:
        if kind == "plain":
            return Trainer(self.shapes, self.devices[0])
        if len(self.devices) < 2:
            raise ConfigError(f"a trainer under FSDP2 is measured on two GPUs, this machine has {torch.cuda.device_count()}")
        return Fsdp2Trainer(self.shapes, (self.devices[0], self.devices[1]))

    def run(self, scratch: Path) -> Results:
        """Runs all stages. scratch: a directory that exists until this returns."""
        plan = stages(self.shapes, self.trainer, scratch)
        for stage in plan:
            for name, sources in stage.copies.items():
                self.attempt(f"the {name} to {stage.engine}", partial(self.copy_limit, stage, name, sources))
        for stage in plan:
            self.play(stage)
        self.attempt("the trainer's end", self.trainer.close)
        for device in self.devices if self.setting.trainer == "plain" else ():
            # Last, and across GPUs last of all: a kernel that fails ends CUDA in this process.
            self.attempt(f"copies to {device}", partial(self.copy_methods, device))
        return Results(setting=self.setting, limits=self.limits, rows=self.rows, copies=self.copies, calls=self.calls, notes=self.notes)

    def copy_limit(self, stage: Stage, name: str, sources: Sequence[str]) -> None:
        self.found(copy_limit(name, stage.engine, sources, stage.device, messages(self.trainer.nbytes)[-1]))
        trim()

    def broadcast_limits(self, name: str, backend: str, subject: Subject) -> None:
        for limit in broadcast_limits(name, subject, self.trainer.device, backend, self.trainer.nbytes):
            self.found(limit)

    def measure_calls(self, subject: Subject) -> None:
        """Measures the calls of a push that move no weights."""
        engine = connect(subject.engine)
        calls = {
            "nothing": lambda: subject.call("pid"),
            "pause": lambda: asyncio.run(engine.pause("reset")),
            "resume": lambda: asyncio.run(engine.resume()),
        }
        seconds = [{name: timed(call) for name, call in calls.items()} for _ in range(CALLS)]
        self.calls[subject.name] = {name: median(some[name] for some in seconds) for name in calls}

    def play(self, stage: Stage) -> None:
        """Runs one stage. Every way of it becomes a row, even if it fails."""
        self.say(f"starting an engine on {stage.engine}")
        waiting = list(stage.ways)
        try:
            with stage.started() as subject:
                bench = Bench(self.trainer, subject, self.repeats)
                self.attempt("calls", partial(self.measure_calls, subject))
                if stage.broadcast is not None:
                    bench.lost = self.attempt(stage.broadcast[0], partial(self.broadcast_limits, *stage.broadcast, subject))
                while waiting:
                    self.tell(bench.measure(waiting[0]))
                    del waiting[0]
        except Exception as error:  # at the engine's start, or at its end
            self.notes.append(f"engine on {stage.engine}: {type(error).__name__}: {error}")
            for way in waiting:
                self.tell(failed(way, stage.engine, error))
        self.attempt("the trainer's GPU", trim)  # the next engine must not see memory become free while it starts

    def copy_methods(self, device: str) -> None:
        for copy in copies(self.trainer.tensors, torch.device(device), self.repeats):
            self.copied(copy)
        if device == self.trainer.device != "cpu":
            self.copied(digest_alone(self.trainer.tensors, torch.device(device), self.repeats))
        trim()

    def copied(self, copy: Copy) -> None:
        self.copies.append(copy)
        self.say(f"{copy.method} to {copy.to}: {copy.error or time(median(copy.seconds))}")

    def attempt(self, what: str, call: Callable[[], object]) -> str | None:
        """Runs a measurement, and notes why if it fails. Returns the reason if it still hangs,
        else None."""
        try:
            bounded(what, call)
        except Exception as error:
            self.notes.append(f"{what}: {type(error).__name__}: {error}")
            self.say(f"not measured: {self.notes[-1]}")
            return str(error) if isinstance(error, Late) else None
        return None

    def found(self, limit: Limit) -> None:
        self.limits.append(limit)
        self.say(f"{limit.name} to {limit.engine}, {size(limit.nbytes)}: {rate(limit.rate)}")

    def tell(self, row: Row) -> None:
        self.rows.append(row)
        medians = row.medians
        text = f"{time(medians['total'])}, paused {time(medians['pause'])}" if medians else f"failed: {row.error}"
        self.say(f"{row.way}, engine on {row.engine}: {text}")


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds of a call that comes after `IDLE` seconds without work."""
    sleep(IDLE)
    started = perf_counter()
    call()
    return perf_counter() - started
