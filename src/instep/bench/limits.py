"""Measures the machine's limits: plain copies, and broadcasts between the trainer's and the
engine's process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep.bench.group import joined
from instep.bench.results import Limit
from instep.bench.subjects import Subject
from instep.bench.trainer import timed_runs
from instep.bench.waits import beside
from instep.bench.worker import exchange

MESSAGES = (1 << 20, 1 << 24, 1 << 28, 1 << 30)
"""Bytes."""
WARM_UPS, REPEATS = 3, 9


def messages(nbytes: int) -> list[int]:
    """Returns message sizes that suit a model of `nbytes`."""
    return [size for size in MESSAGES if size <= max(nbytes, MESSAGES[1])]


def copy_limit(name: str, engine: str, sources: Sequence[str], target: str, nbytes: int) -> Limit:
    """Measures copies of `nbytes`, in equal parts from all sources at once, by PyTorch's
    `copy_`."""
    parts = [[torch.zeros(nbytes // len(sources), dtype=torch.uint8, device=device) for device in (source, target)] for source in sources]
    place = torch.device(target)
    streams = [torch.cuda.Stream(place) if place.type == "cuda" else None for _ in sources]  # type: ignore[no-untyped-call]

    def copy() -> None:
        for (held, room), stream in zip(parts, streams, strict=True):
            with torch.cuda.stream(stream):
                room.copy_(held, non_blocking=True)

    return Limit(name=name, engine=engine, nbytes=nbytes, seconds=timed_runs(copy, WARM_UPS, REPEATS))


def broadcast_limits(name: str, subject: Subject, device: str, backend: str, nbytes: int) -> list[Limit]:
    """Measures broadcasts of PyTorch's process group, timed at the receiver."""
    limits = []
    with joined(subject, backend, device) as group:
        for size in messages(nbytes):
            message = torch.ones(size, dtype=torch.uint8, device=device)
            sending = beside(lambda message=message: exchange(group, message, WARM_UPS + REPEATS))  # type: ignore[misc]
            seconds = subject.call("receive_messages", size, WARM_UPS + REPEATS)
            sending.result()
            limits.append(Limit(name=name, engine=subject.name, nbytes=size, seconds=seconds[WARM_UPS:]))
    return limits
