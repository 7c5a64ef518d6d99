"""CUDA IPC, a worker's side: opens handles of a trainer's memory, and pulls what it needs straight out of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from instep.digest import MASK, Words
from instep.digest_cuda import Table, run_of, warm_up
from instep.errors import TransportError
from instep.plan.rows import Rows, common, contiguous, of_place
from instep.protocol import Manifest, TensorMeta
from instep.transport.ipc import driver
from instep.transport.reader import Remote, WorkerContext

LOOK = 0.00002
"""Seconds between two looks at a trainer's board."""

OPENED: dict[bytes, int] = {}
"""Handles that this process has mapped, and where. Opening one twice in a process is an error of the driver."""


WARM: set[torch.device] = set()
"""GPUs of this process that have the kernels."""


def current_gpu() -> torch.device:
    """Returns this worker's current GPU. Raises `TransportError` where it has none."""
    if not torch.cuda.is_available():
        raise TransportError("this worker has no GPU: CUDA IPC cannot reach it")
    return torch.device("cuda", torch.cuda.current_device())


class IpcReader(Remote):
    """A worker's side, on its current device. Addresses stay mapped from version to version, in
    `OPENED`."""

    def __init__(self, manifest: Manifest, me: WorkerContext) -> None:
        self.device, self.timeout = current_gpu(), me.timeout
        self.fetches = self.device not in WARM
        self.location = manifest.location
        self.listed = manifest.tensors
        if new := [handle for handle in self.location.handles if handle not in OPENED]:
            torch.cuda.synchronize(self.device)  # makes the context current before the driver is called
            for handle in new:
                OPENED[handle] = _attach(handle)
        for handle in OPENED.keys() - set(self.location.handles):
            driver.detach(OPENED.pop(handle))
        self.bases = [OPENED[handle] for handle in self.location.handles]
        self.pulled: dict[str, torch.Tensor] = {}
        self.read = b""  # the trainer's sums, once they are complete

    @cached_property
    def metas(self) -> Mapping[str, TensorMeta]:
        return {meta.name: meta for meta in self.listed}

    def places(self, meta: TensorMeta) -> list[Rows]:
        """Returns where the parts of a tensor are mapped in this process, in words of 8 bytes."""
        return [of_place(place, meta, self.bases[place.handle]) for place in self.location.places[meta.alias_of or meta.name]]

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        """Starts a copy of a tensor to the engine's own GPU, which is summed up on the way, and
        returns it. Layers that are not copied directly read it."""
        own = self.metas[meta.alias_of or meta.name]
        room = torch.empty(-(-meta.nbytes // 8), dtype=torch.int64, device=self.device)
        there = contiguous(len(room), room.data_ptr() // 8)
        self.pulled[own.name] = torch.zeros(2, dtype=torch.int64, device=self.device)
        runs = [run_of(rows, own, 0) for part in self.places(own) for rows in common(part, there)]
        Table(runs, 1, self.device, copy=True, sums=self.pulled[own.name]).launch()
        return room.view(torch.uint8)[: meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)

    def sums(self) -> dict[str, int]:
        """Waits for the tensors that were pulled whole and returns their sums."""
        if not self.pulled:
            return {}
        return {name: value & MASK for name, value in zip(self.pulled, torch.stack(list(self.pulled.values()))[:, 0].tolist(), strict=True)}

    def wait_for(self, launch: int) -> None:
        """Wait until the trainer's own sums of a launch are complete, where they can be read.

        Nothing may be pulled before: sums that are complete when the pull begins, and equal to those of the pull, show that the weights
        stood still in between. Raises `TransportError` where they are not complete in half of the time that this step may take.
        """
        if not launch or self.location.board is None:
            return
        handle, at = self.location.board
        board, deadline = self.bases[handle] + at, time.monotonic() + self.timeout / 2
        while (done := int.from_bytes(driver.read(board, 8), "little")) < launch:
            if time.monotonic() > deadline:
                raise TransportError(f"the trainer's GPU did not sum up its weights within {self.timeout / 2:g} s: is it busy?")
            time.sleep(LOOK)
        if done > launch:
            raise TransportError("the trainer has begun another push meanwhile")
        self.read = driver.read(board + 8, 8 * len(self.location.places))

    def board(self) -> tuple[Sequence[str], Words]:
        """Returns the sums that `wait_for` has read."""
        return (list(self.location.places) if self.read else ()), np.frombuffer(self.read, np.uint64)

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        """Loads the kernels, which takes time once. No bytes arrive: they are pulled, and summed
        up, in the commit."""
        warm_up(self.device)
        WARM.add(self.device)
        return {}


def _attach(handle: bytes) -> int:
    try:
        return driver.attach(handle)
    except TransportError as error:
        raise TransportError(
            f"the trainer's GPU memory cannot be opened from this worker: {error.args[0]}",
            next_step="trainer and engine need one host, GPUs with peer access (nvidia-smi topo -p2p r), and in a container shared IPC",
        ) from error
