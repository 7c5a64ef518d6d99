"""The half of the benchmark that runs inside an engine's worker: other ways to bring weights in,
and the receiving end of raw transfers."""

from __future__ import annotations

import faulthandler
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from instep.bench.waits import DEADLINE
from instep.engine.vllm.worker import VllmHost, WorkerExtension
from instep.receiver import Host
from instep.transport.group import Group
from instep.transport.store import find

Described = tuple[str, str, list[int]]
"""Name, dtype and shape of a tensor."""


class BenchExtension(WorkerExtension):
    """Both halves: a push reaches vLLM's worker through `instep_call`, the benchmark through
    `bench_call`."""

    def bench_call(self, method: str, arguments: list[Any]) -> Any:
        if "bench_worker" not in self.__dict__:
            self.__dict__["bench_worker"] = BenchWorker(VllmHost(self))
        faulthandler.dump_traceback_later(DEADLINE / 2)  # where it waits
        try:
            return getattr(self.__dict__["bench_worker"], method)(*arguments)
        finally:
            faulthandler.cancel_dump_traceback_later()


class BenchWorker:
    """The benchmark's part of one worker. Arguments and results are plain numbers, strings and
    lists."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.held: dict[str, torch.Tensor] = {}
        self.group: Any = None  # a `Group` between `join` and `leave`

    def pid(self) -> int:
        return os.getpid()

    def trim(self) -> None:
        """Returns unused GPU memory to the driver, so that later allocations are visible."""
        gc.collect()
        torch.cuda.empty_cache()

    def hold(self, folder: str) -> None:
        """Keeps a checkpoint's tensors in the worker's memory."""
        self.held = dict(read(Path(folder)))

    def negate_held(self) -> None:
        torch._foreach_neg_(list(self.held.values()))

    def reload_held(self) -> float:
        """Returns the seconds of a reload session over tensors that are already here."""
        started = time.perf_counter()
        with self.host.reload():
            self.host.load(self.held.items())
        return time.perf_counter() - started

    def drop(self) -> None:
        self.held = {}

    def reload_from(self, folder: str) -> None:
        with self.host.reload():
            self.host.load(read(Path(folder)))

    def join(self, backend: str, port: int) -> None:
        """Becomes rank 1 of a group of two."""
        self.group = Group(backend, find("127.0.0.1", port, DEADLINE), "bench", 1, 2, torch.device(self.host.device), DEADLINE)

    def leave(self) -> None:
        self.group.close()
        self.group = None

    def receive(self, described: list[Described]) -> float:
        """Returns the seconds of a reload session that is fed from the group, one broadcast for
        each tensor."""
        started = time.perf_counter()
        with self.host.reload():
            self.host.load(self._arriving(described))
        return time.perf_counter() - started

    def _arriving(self, described: list[Described]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in described:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(tensor).wait()
            yield name, tensor

    def receive_messages(self, nbytes: int, count: int) -> list[float]:
        """Returns the seconds of each of `count` broadcasts of one message."""
        return exchange(self.group, torch.empty(nbytes, dtype=torch.uint8, device=self.host.device), count)


def read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the tensors of a checkpoint directory, copied out of its files."""
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        yield from ((name, tensor.clone()) for name, tensor in load_file(file).items())


def exchange(group: Group, message: torch.Tensor, count: int) -> list[float]:
    """Broadcasts `message` from rank 0 to rank 1 `count` times. Returns the seconds of each, the
    wait for the GPU included."""
    seconds = []
    group.begin(DEADLINE / 2)
    for _ in range(count):
        started = time.perf_counter()
        group.wait(group.broadcast(message))
        group.settle()
        seconds.append(time.perf_counter() - started)
    return seconds
