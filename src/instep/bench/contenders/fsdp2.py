"""Pushes from two ranks under FSDP2: `WeightSync.push` on both, and the alternative that
gathers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from instep import WeightSync
from instep.bench.contenders.ours import phases
from instep.bench.contenders.vllm_nccl import vllm_nccl
from instep.bench.fsdp2 import Fsdp2Trainer
from instep.bench.measure import Push
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.config import TransportName


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


@contextmanager
def full_tensors(trainer: Trainer, subject: Subject) -> Iterator[Push]:
    """Gathers each parameter with `full_tensor()`. Rank 0 sends it to the engine by vLLM's own
    packed NCCL transfer."""
    assert isinstance(trainer, Fsdp2Trainer)
    with vllm_nccl(True, trainer, subject) as send:

        def push() -> dict[str, float]:
            with trainer.peer.doing("gather"):
                return send()

        yield push
