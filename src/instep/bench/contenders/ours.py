"""Pushes with `WeightSync.push` over one transport, from one process and from two ranks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from instep import WeightSync
from instep.bench.fsdp2 import Fsdp2Trainer
from instep.bench.measure import Push
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.config import TransportName
from instep.receipt import Receipt


@contextmanager
def instep(transport: TransportName, trainer: Trainer, subject: Subject) -> Iterator[Push]:
    with WeightSync(trainer.model, [subject.engine], transport=transport) as sync:

        def push() -> dict[str, float]:
            return phases(sync.push(uuid.uuid4().hex))

        yield push


@contextmanager
def instep_from_ranks(transport: TransportName, trainer: Trainer, subject: Subject) -> Iterator[Push]:
    assert isinstance(trainer, Fsdp2Trainer)
    with trainer.peer.doing("open", transport):
        sync = WeightSync(trainer.sharded, [subject.engine], transport=transport)

    def push() -> dict[str, float]:
        version = uuid.uuid4().hex
        with trainer.peer.doing("push", version):
            return phases(sync.push(version))

    try:
        yield push
    finally:
        with trainer.peer.doing("close"):
            sync.close()


def phases(receipt: Receipt) -> dict[str, float]:
    """Returns seconds by phase. `total` is left out: the benchmark times the whole call."""
    seconds = {name: seconds for name, seconds in receipt.seconds.items() if name != "total"}
    return {"pause": receipt.pause, "apply": max(engine.apply for engine in receipt.engines), **seconds}
