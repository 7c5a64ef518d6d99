"""Trainers, engines, steps, cancellations, deaths and refusals in any order.

The invariant: whenever an engine serves under a label, its bytes are those that the label's trainer had at
one moment of that push. Hypothesis drives real receivers and a real fleet in one process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.hanging import shorten_deadlines
from helpers.toys import Checkpoint, attention
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from instep import MemoryEngine, WeightSync
from instep.errors import EngineDirty, InstepError
from instep.telemetry import Event

FIRST = attention(0)
TRAINERS = st.integers(0, 1)
WRITES = st.sampled_from(["counted", "data", "numpy", "one tensor"])
POINTS = st.sampled_from(["hello", "trace", "prepare", "ready", "commit", "digest", "label", "pause", "resume", "abort"])


@dataclass
class Trainer:
    """One trainer's weights, and every state that they were in."""

    weights: Checkpoint
    sync: WeightSync
    moments: list[Checkpoint] = field(default_factory=list)
    meanwhile: tuple[int, str] | None = None
    """The event of the next push at which the trainer steps, and how."""
    events: int = 0

    def remember(self) -> None:
        self.moments.append({name: tensor.clone() for name, tensor in self.weights.items()})

    def step(self, how: str) -> None:
        for name, tensor in self.weights.items():
            if how == "one tensor" and name != "model.norm.weight":
                continue
            if how == "numpy":
                tensor.view(torch.int16).numpy()[...] ^= 1
            else:
                (tensor if how == "counted" else tensor.data).mul_(-1.5)
        self.remember()


def fingerprint(weights: Checkpoint, tp: int) -> int:
    return MemoryEngine(weights, tp=tp).fingerprint()


class Machine(RuleBasedStateMachine):
    """Two trainers push to the same two engines."""

    @initialize()
    def begin(self) -> None:
        self.patches = pytest.MonkeyPatch()
        shorten_deadlines(self.patches)
        self.labels = map("v{}".format, itertools.count())
        self.engines = [MemoryEngine(FIRST, tp=tp, name=f"engine-{tp}") for tp in (1, 2)]
        self.born = {id(engine): engine.fingerprint() for engine in self.engines}
        self.wrong: list[str] = []  # found in the middle of a push, where an exception would only be logged
        self.pushed: dict[str, tuple[Trainer, int]] = {}
        self.trainers = [self.trainer(seed, transport) for seed, transport in ((1, "shm"), (2, "gloo"))]

    def trainer(self, seed: int, transport: Any) -> Trainer:
        weights = attention(seed)
        trainer = Trainer(weights, WeightSync(weights, self.engines, transport=transport, timeout=5))
        trainer.sync._session.sinks = (lambda event: self.heard(trainer, event),)
        trainer.remember()
        return trainer

    def heard(self, trainer: Trainer, _: Event) -> None:
        """At any event of a push the trainer may step, and what serves must be right."""
        trainer.events += 1
        if trainer.meanwhile is not None and trainer.events == trainer.meanwhile[0]:
            trainer.step(trainer.meanwhile[1])
        self.wrong += self.unlike_their_label()

    @rule(number=TRAINERS, how=WRITES)
    def step(self, number: int, how: str) -> None:
        self.trainers[number].step(how)

    @rule(number=TRAINERS, meanwhile=st.none() | st.tuples(st.integers(1, 12), WRITES), cancelled=st.none() | st.integers(1, 60))
    def push(self, number: int, meanwhile: tuple[int, str] | None, cancelled: int | None) -> None:
        trainer, label = self.trainers[number], next(self.labels)
        self.pushed[label] = trainer, len(trainer.moments) - 1
        trainer.events, trainer.meanwhile = 0, meanwhile
        self.run(trainer.sync.apush(label), cancelled)
        trainer.meanwhile = None

    @rule(number=TRAINERS, cancelled=st.none() | st.integers(1, 60))
    def catch_up(self, number: int, cancelled: int | None) -> None:
        self.run(self.trainers[number].sync.acatch_up(), cancelled)

    @rule(number=TRAINERS)
    def ask(self, number: int) -> None:
        self.trainers[number].sync.status()

    @rule(engine=st.integers(0, 1), point=POINTS, kind=st.sampled_from(["error", "hang"]))
    def fail_later(self, engine: int, point: Any, kind: Any) -> None:
        self.engines[engine].inject(point, kind)

    @rule(engine=st.integers(0, 1), tensor=st.integers(0, 4))
    def fail_within_the_loader_later(self, engine: int, tensor: int) -> None:
        self.engines[engine].inject("tensor", tensor=tensor)

    @rule(number=TRAINERS)
    def begin_anew(self, number: int) -> None:
        """A trainer ends, and another takes its place."""
        self.trainers[number].sync.close()
        self.trainers[number] = self.trainer(len(self.pushed) + 3, ("shm", "gloo")[number])

    def run(self, call: Any, cancelled: int | None) -> None:
        """To its end, or cancelled after so many turns of the event loop."""

        async def main() -> None:
            task = asyncio.ensure_future(call)
            for _ in range(cancelled or 0):
                await asyncio.sleep(0)
            if cancelled is not None:
                task.cancel()
            with suppress(InstepError, asyncio.CancelledError):
                await task

        asyncio.run(main())

    def unlike_their_label(self) -> list[str]:
        wrong = []
        for engine in self.engines:
            if engine.paused or engine.dead:
                continue
            try:
                with engine._gate.passing(engine.name, 1.0):
                    held, label = engine.fingerprint(), engine.version
            except (EngineDirty, RuntimeError):  # it does not serve
                continue
            if label is None:
                right = [self.born[id(engine)]]
            else:
                trainer, since = self.pushed[label]
                right = [fingerprint(weights, len(engine.hosts)) for weights in trainer.moments[since:]]
            if held not in right:
                wrong.append(f"{engine.name} serves under {label} what its trainer never had")
        return wrong

    @invariant()
    def engines_serve_what_their_label_says(self) -> None:
        if hasattr(self, "engines"):
            assert self.wrong + self.unlike_their_label() == []

    @invariant()
    def nobody_is_left_paused(self) -> None:
        if hasattr(self, "engines") and not any(trainer.events and trainer.meanwhile for trainer in self.trainers):
            for engine in self.engines:
                assert engine.refusal or engine.dead or not engine.paused, f"{engine.name} is paused and does not refuse"

    def teardown(self) -> None:
        for trainer in getattr(self, "trainers", []):
            trainer.sync.close()
        if hasattr(self, "patches"):
            self.patches.undo()


EXAMPLES = int(os.environ.get("INSTEP_MACHINE_RUNS", "25"))
"""Runs of up to 20 calls each. `INSTEP_MACHINE_RUNS=5000` looks for what a few runs do not meet."""

TestMachine = pytest.mark.timeout(60 + 20 * EXAMPLES)(Machine.TestCase)
TestMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
