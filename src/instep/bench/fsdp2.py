"""A trainer of two ranks under FSDP2: this process, and one that it starts. Each has half of
every weight on its own device."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from instep.bench import shapes
from instep.bench.group import free_port
from instep.bench.memory import trim
from instep.bench.trainer import Trainer
from instep.bench.waits import DEADLINE
from instep.config import TransportName

START = 240.0
"""Seconds for a process to start and to make its model."""
AFTER = 20.0
"""Seconds to take down the group."""


def sharded(name: str, device: str, rank: int, port: int) -> Any:
    """Makes one rank's part of the model that `shapes.model` makes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = torch.device(device).type
    torch.distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    model = shapes.model(name, 1, device).requires_grad_(False)
    mesh = init_device_mesh(kind, (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def negate(model: Any) -> None:
    torch._foreach_neg_([param._local_tensor for param in model.parameters()])


class Rank:
    """The methods that rank 1 runs at rank 0's request."""

    def __init__(self, name: str, device: str, port: int) -> None:
        self.name, self.device, self.port = name, device, port
        self.sync: Any = None

    def make(self) -> None:
        self.model = sharded(self.name, self.device, 1, self.port)
        trim()

    def step(self) -> None:
        negate(self.model)
        self._settle()

    def open(self, transport: TransportName) -> None:
        from instep import WeightSync

        self.sync = WeightSync(self.model, [], transport=transport)

    def push(self, version: str) -> None:
        self.sync.push(version)

    def close(self) -> None:
        self.sync.close()

    def gather(self) -> None:
        for param in self.model.parameters():
            param.full_tensor()
        self._settle()

    def leave(self) -> None:
        torch.distributed.destroy_process_group()

    def _settle(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)


def serve(pipe: Any, kind: type[Rank], name: str, device: str, port: int) -> None:
    """Runs rank 1's process, which ends with rank 0's."""
    if device != "cpu":
        torch.cuda.set_device(device)
    rank = kind(name, device, port)
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # threads of process groups may wait for the other rank
        try:
            getattr(rank, what)(*arguments)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
        else:
            pipe.send(None)


class Peer:
    """Rank 0's handle on rank 1."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    @contextmanager
    def doing(self, what: str, *arguments: Any, seconds: float = DEADLINE) -> Iterator[None]:
        """Has rank 1 do its half of a step while this block does the other. Raises
        `RuntimeError` for an error of rank 1."""
        self.pipe.send((what, arguments))
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the error here is the one to tell
                self._answer(what, seconds)
            raise
        if (error := self._answer(what, seconds)) is not None:
            raise RuntimeError(f"rank 1 of the trainer, {what}: {error}")

    def _answer(self, what: str, seconds: float) -> str | None:
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"rank 1 of the trainer did not end {what!r} within {seconds:g} s")
        answer: str | None = self.pipe.recv()
        return answer

    def close(self) -> None:
        self.pipe.close()
        self.process.join(10)
        self.process.kill()


class Fsdp2Trainer(Trainer):
    """A trainer of two ranks. sharded: this rank's half. `model` and `tensors` are whole, with
    the same weights; the engine is compared with them.

    devices: of both ranks. There is one of these in a process at a time.
    """

    rank = Rank

    def __init__(self, name: str, devices: tuple[str, str]) -> None:
        super().__init__(name, devices[0])
        port = free_port()
        self.peer = Peer(self.rank, name, devices[1], port)
        try:
            with self.peer.doing("make", seconds=START):
                self.sharded = sharded(name, devices[0], 0, port)
        except BaseException:
            self.peer.process.kill()
            raise
        trim()

    def step(self) -> None:
        with self.peer.doing("step"):
            negate(self.sharded)
            super().step()

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gathers the tensors one by one, while the other rank runs "gather"."""
        return ((name, param.full_tensor()) for name, param in self.sharded.named_parameters())

    def close(self) -> None:
        try:
            with self.peer.doing("leave", seconds=AFTER):
                torch.distributed.destroy_process_group()
        finally:
            self.peer.close()
