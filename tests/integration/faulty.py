"""Worker extensions for tests: one that can be told to fail inside vLLM's worker, one that keeps weights as a GPU would."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from instep.engine.vllm.worker import VllmHost, WorkerExtension, adopt
from instep.receiver import Fill
from instep.receiver.state import Receiver


class FaultyHost(VllmHost):
    """Fails once, after `steps` layers were rebuilt and tensors loaded, or when all has been written."""

    steps: int | None = None
    finish = False

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load(self._cut(tensors))

    def _cut(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        real = False
        for name, tensor in tensors:
            real = not tensor.is_meta
            if real:
                self._step()
            yield name, tensor
        if real:
            self._end()

    def rebuild(self, layer: str, fill: Fill) -> None:
        self._step()
        super().rebuild(layer, fill)

    def refresh(self) -> None:
        super().refresh()
        self._end()

    def _step(self) -> None:
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                self.steps = None
                raise RuntimeError("told to fail in the middle")

    def _end(self) -> None:
        if self.finish:
            self.finish = False
            raise RuntimeError("told to fail at the end")


class FaultyReceiver(Receiver):
    host: FaultyHost
    point = ""
    seconds = 0.0
    refused = ""

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == self.point:
            self.point = ""
            if self.seconds < 0:
                os._exit(1)
            time.sleep(self.seconds)
        if method == self.refused:
            self.refused = ""
            method = "told to refuse"
        return super().handle(method, payload)


class FaultyExtension(WorkerExtension):
    """`inject("step", k)` and `inject("finish", 0)`: the commit fails. `inject("hang:METHOD", seconds)`: an answer comes late.
    `inject("die:METHOD", rank)`: the process ends. `inject("refuse:METHOD", 0)`: the answer is a fault.
    `inject("adapter", number)`: vLLM fails to load that LoRA adapter, which was pushed before.
    With `rank` only that worker is told."""

    def instep_call(self, method: str, payload: bytes) -> bytes:
        self.faulty_receiver()
        return super().instep_call(method, payload)

    def faulty_receiver(self) -> FaultyReceiver:
        if "instep_receiver" not in self.__dict__:
            adopt(self, FaultyHost(self), FaultyReceiver)
        receiver: FaultyReceiver = self.__dict__["instep_receiver"]
        return receiver

    def inject(self, point: str, value: float, rank: int | None = None) -> str:
        receiver = self.faulty_receiver()
        kind, _, method = point.partition(":")
        if rank not in (None, receiver.host.rank):
            return "not told"
        if kind == "step":
            receiver.host.steps = int(value)
        elif kind == "finish":
            receiver.host.finish = True
        elif kind == "adapter":
            fail_to_load(receiver.of_adapter(int(value)).host)
        elif kind == "refuse":
            receiver.refused = method
        elif kind == "hang":
            receiver.point, receiver.seconds = method, value
        elif kind == "die" and receiver.host.rank == int(value):
            receiver.point, receiver.seconds = method, -1.0
        return "ready"


def fail_to_load(adapter: Any) -> None:
    read = adapter.read_folder

    def fail(_: Any) -> None:
        adapter.read_folder = read
        raise RuntimeError("told to fail while vLLM loads it")

    adapter.read_folder = fail
