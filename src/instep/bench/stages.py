"""Decides which engine is started where, and which ways are measured on it. An engine takes a
minute to start, so ways share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from instep.bench import contenders, shapes
from instep.bench.fsdp2 import Fsdp2Trainer
from instep.bench.measure import Way
from instep.bench.subjects import MemorySubject, Subject, VllmSubject, weight_transfer
from instep.bench.trainer import Trainer
from instep.bench.waits import bounded

START = 300.0
"""Seconds for an engine to start."""


@dataclass(frozen=True)
class Stage:
    """One engine and its ways. engine: its name. start: starts it. copies: for each raw rate of
    copies to `device`, the devices that equal parts come from. broadcast: the name of the raw
    rate of broadcasts to the engine's worker, and their backend."""

    engine: str
    start: Callable[[], Subject]
    ways: tuple[Way, ...]
    copies: Mapping[str, tuple[str, ...]]
    device: str
    broadcast: tuple[str, str] | None = None

    @contextmanager
    def started(self) -> Iterator[Subject]:
        subject = bounded("the start of the engine", self.start, START)
        try:
            yield subject
        finally:
            bounded("the engine's end", subject.close)


def stages(name: str, trainer: Trainer, scratch: Path) -> list[Stage]:
    """Returns the stages for this machine. scratch: a directory that exists as long as the
    stages run."""
    folder = shapes.folder(name, scratch)
    if isinstance(trainer, Fsdp2Trainer):
        return from_two_ranks(trainer, folder)
    return on_gpus(trainer, folder) if torch.cuda.is_available() else [on_cpu(trainer, folder)]


def on_cpu(trainer: Trainer, folder: Path) -> Stage:
    broadcast, copies = (contenders.GLOO, "gloo"), {contenders.MEMORY_COPY: ("cpu",)}
    if find_spec("vllm") is None:
        return Stage("memory", lambda: MemorySubject(trainer), contenders.ON_CPU, copies, "cpu", broadcast)

    def start() -> Subject:
        trainer.save(folder)  # vLLM reloads only an engine that it has loaded from disk
        return VllmSubject(trainer, folder, load_format="auto")

    return Stage("CPU", start, contenders.ON_CPU, copies, "cpu", broadcast)


def on_gpus(trainer: Trainer, folder: Path) -> list[Stage]:
    """Returns stages for a trainer on GPU 0. vLLM's two transfers need an engine each."""

    def start(gpu: int, backend: str) -> Subject:
        return VllmSubject(trainer, folder, gpu, **weight_transfer(backend))

    same = Stage("GPU 0", partial(start, 0, "ipc"), contenders.ON_THE_TRAINERS_GPU, {contenders.DEVICE_COPY: ("cuda:0",)}, "cuda:0")
    if torch.cuda.device_count() == 1:
        return [same]
    nccl, copies = (contenders.NCCL, "nccl"), {contenders.PEER_COPY: ("cuda:0",)}
    return [Stage("GPU 1", partial(start, 1, "nccl"), contenders.ON_ANOTHER_GPU, copies, "cuda:1", nccl), same]


def from_two_ranks(trainer: Trainer, folder: Path) -> list[Stage]:
    """Returns stages for a trainer on GPUs 0 and 1. An engine on GPU 1 has half of the weights
    beside it, and takes turns with a rank there. One on GPU 2, if there is one, has no weights
    beside it."""

    def start(gpu: int) -> Subject:
        return VllmSubject(trainer, folder, gpu, **weight_transfer("nccl"))

    ranks = ("cuda:0", "cuda:1")
    copies = {contenders.PEER_COPY: ranks[:1], contenders.HALVES: ranks}
    return [
        Stage(f"GPU {gpu}", partial(start, gpu), contenders.FROM_TWO_RANKS, copies, f"cuda:{gpu}", (contenders.NCCL, "nccl"))
        for gpu in range(1, min(3, torch.cuda.device_count()))
    ]
