"""CUDA IPC, a worker's side: opens handles of a trainer's memory, and pulls what it needs straight
out of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from instep.digest import MASK, Words
from instep.digest_cuda import Run, Table, run_of, warm_up
from instep.errors import TransportError
from instep.plan.rows import Rows, common, contiguous, of_place
from instep.protocol import Manifest, TensorMeta
from instep.transport.ipc import driver
from instep.transport.reader import Remote, WorkerContext

LOOK = 0.00002
"""Seconds between two looks at a trainer's board."""

TOGETHER = 128 << 20
"""Bytes of tensors that one launch copies for an engine's loader, unless one tensor has more."""

ALIGN = 512
"""Bytes: each of them begins at a multiple, as in memory of its own."""

OPENED: dict[bytes, int] = {}
"""Handles that this process has mapped, and where. Opening one twice in a process is an error of
the driver."""


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
        self.pulled: dict[str, tuple[torch.Tensor, int]] = {}  # sums of the last copy of each, and its slot there
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
        return self._pull([meta])[0]

    def tensors(self, metas: Sequence[TensorMeta]) -> Iterator[torch.Tensor]:
        """Yields what `tensor` returns for each. One launch copies as many as lie within
        `TOGETHER`: a table takes longer to make than a few MB take to travel."""
        first = size = 0
        for number, meta in enumerate(metas):
            if size and size + meta.nbytes > TOGETHER:
                yield from self._pull(metas[first:number])
                first, size = number, 0
            size += meta.nbytes
        if metas:
            yield from self._pull(metas[first:])

    def _pull(self, metas: Sequence[TensorMeta]) -> list[torch.Tensor]:
        places = [0, *accumulate(-(-meta.nbytes // ALIGN) * ALIGN for meta in metas)]
        room = torch.empty(places[-1], dtype=torch.uint8, device=self.device)
        runs: list[Run] = []
        owns = [self.metas[meta.alias_of or meta.name] for meta in metas]
        for slot, (own, at) in enumerate(zip(owns, places, strict=False)):
            there = contiguous(-(-own.nbytes // 8), (room.data_ptr() + at) // 8)
            runs += [run_of(rows, own, slot) for part in self.places(own) for rows in common(part, there)]
        table = Table(runs, len(owns), self.device, copy=True)
        table.launch()
        self.pulled |= {own.name: (table.sums, slot) for slot, own in enumerate(owns)}
        return [
            room[at : at + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape) for meta, at in zip(metas, places, strict=False)
        ]

    def sums(self) -> dict[str, int]:
        """Waits for the tensors that were pulled whole and returns their sums."""
        if not self.pulled:
            return {}
        boards = list({id(board): board for board, _ in self.pulled.values()}.values())
        starts = dict(zip(map(id, boards), accumulate(map(len, boards), initial=0), strict=False))
        sums = torch.cat(boards).tolist()
        return {name: sums[starts[id(board)] + slot] & MASK for name, (board, slot) in self.pulled.items()}

    def wait_for(self, launch: int) -> None:
        """Wait until the trainer's own sums of a launch are complete, where they can be read.

        Nothing may be pulled before: sums that are complete when the pull begins, and equal to
        those of the pull, show that the weights stood still in between. Raises `TransportError`
        where they are not complete in half of the time that this step may take.
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
