"""Broadcasts each tensor over Gloo into the engine's own reload session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from instep.bench.group import joined
from instep.bench.measure import Push
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.bench.waits import DEADLINE, beside
from instep.protocol import dtype_name


@contextmanager
def gloo(trainer: Trainer, subject: Subject) -> Iterator[Push]:
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
