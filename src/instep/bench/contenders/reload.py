"""The lower bound of a reload: the engine's own session over tensors that its worker already has
in memory. Nothing is transferred."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.bench.measure import Push
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.transport.shm.segment import directory


@contextmanager
def reload_in_memory(trainer: Trainer, subject: Subject) -> Iterator[Push]:
    with tempfile.TemporaryDirectory(dir=directory()) as folder:
        trainer.save(Path(folder))
        subject.call("hold", folder)
    held_at = trainer.steps

    def push() -> dict[str, float]:
        nonlocal held_at
        if (trainer.steps - held_at) % 2:
            subject.call("negate_held")
        held_at = trainer.steps
        seconds = subject.call("reload_held")
        return {"total": seconds, "pause": seconds}

    yield push
    subject.call("drop")
