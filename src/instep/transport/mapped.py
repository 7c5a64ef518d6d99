"""A version whose bytes a worker has in its own address space: a file that is mapped read-only."""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from contextlib import suppress

import numpy as np
import torch

from instep.digest import Bytes
from instep.errors import TransportError
from instep.plan.packed import packed
from instep.protocol import Manifest, TensorMeta
from instep.transport.reader import Visible, WorkerContext


class Mapped(Visible):
    """A reader of bytes that are mapped into the worker's address space."""

    def __init__(self, manifest: Manifest, file: int) -> None:
        location = manifest.location
        self.places, self.size = packed(manifest.tensors, small=location.packed), location.nbytes
        self.offsets = self.places.offsets
        if self.places.size > self.size:
            raise TransportError(f"the manifest's tensors take {self.places.size} bytes, its segment has {self.size}")
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # one walk instead of a fault for each page
        self.map = mmap.mmap(file, max(self.size, 1), flags, mmap.PROT_READ)
        self.bytes: Bytes = np.frombuffer(self.map, np.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self.flat: torch.Tensor = torch.from_numpy(self.bytes)

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        return self.places.digests(self.bytes)

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        at = self.offsets[meta.alias_of or meta.name]
        return self.flat[at : at + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)

    def close(self) -> bool:
        self.bytes, self.flat = np.empty(0, np.uint8), torch.empty(0)
        with suppress(BufferError):
            self.map.close()
        return self.map.closed


class Staged(Mapped):
    """A version that is brought into the worker's own memory. room: that memory, until all bytes
    are there."""

    def __init__(self, manifest: Manifest, me: WorkerContext) -> None:
        self.location, self.me, self.tensors = manifest.location, me, manifest.tensors
        file = _anonymous_file(self.location.nbytes)
        try:
            super().__init__(manifest, file)
            self.room = torch.from_numpy(np.frombuffer(mmap.mmap(file, max(self.size, 1)), np.uint8))
        finally:
            os.close(file)


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("instep")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, max(size, 1))
    return file
