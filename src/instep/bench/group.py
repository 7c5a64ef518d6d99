"""A process group of the trainer and an engine's worker, for transfers that are no push. It is
made once and kept."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from instep.bench.subjects import Subject
from instep.bench.waits import DEADLINE, beside
from instep.transport.group import Group
from instep.transport.store import serve


def free_port() -> int:
    """Finds a free port for a group whose store somebody else will serve."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def joined(subject: Subject, backend: str, device: str) -> Iterator[Group]:
    """Yields the trainer's end, rank 0, for tensors on `device`. The worker is rank 1. backend:
    "gloo" or "nccl"."""
    store = serve("127.0.0.1")
    making = beside(lambda: Group(backend, store, "bench", 0, 2, torch.device(device), DEADLINE))
    subject.call("join", backend, store.port)
    group = making.result(DEADLINE)
    try:
        yield group
    finally:
        group.close()  # first: it needs nobody's answer, and ends transfers that hang
        subject.call("leave")
