"""What one would write oneself, and the least that a reload takes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.bench.group import joined
from instep.bench.measure import Push
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.bench.waits import DEADLINE, beside
from instep.protocol import dtype_name
from instep.transport.shm.segment import directory


@contextmanager
def save_and_reload(trainer: Trainer, subject: Subject) -> Iterator[Push]:
    """Saves with `save_pretrained` to a RAM disk, from which the engine reloads in its own way."""
    with tempfile.TemporaryDirectory(dir=directory()) as ram:
        checkpoint = Path(ram) / "checkpoint"

        def push() -> dict[str, float]:
            trainer.save(checkpoint)
            saved = time.perf_counter()
            subject.reload(checkpoint)
            pause = time.perf_counter() - saved
            shutil.rmtree(checkpoint)
            return {"pause": pause}

        yield push


@contextmanager
def reload_in_memory(trainer: Trainer, subject: Subject) -> Iterator[Push]:
    """Runs the engine's reload session over tensors that its worker has already: the lower bound of
    a reload. Nothing is transferred."""
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


@contextmanager
def gloo(trainer: Trainer, subject: Subject) -> Iterator[Push]:
    """Broadcasts each tensor over Gloo into the engine's own reload session."""
    described = [(name, dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in trainer.tensors.items()]
    with joined(subject, "gloo", trainer.device) as group:

        def send() -> None:
            for tensor in trainer.tensors.values():
                group.broadcast(tensor).wait()

        def push() -> dict[str, float]:
            sending = beside(send)
            pause = subject.call("receive", described)
            sending.result(DEADLINE)
            return {"pause": pause}

        yield push
