"""A version whose bytes this worker has in its own address space: a file mapped read-only."""

from __future__ import annotations

import mmap
import warnings
from contextlib import suppress

import numpy as np
import torch

from instep.digest import Bytes, digests
from instep.errors import TransportError
from instep.plan.buckets import ALIGN, padded
from instep.protocol import Manifest, TensorMeta


class Mapped:
    """The part of a `Reader` that follows from having the bytes."""

    arrived = fetches = True

    def __init__(self, manifest: Manifest, file: int) -> None:
        location = manifest.location
        self.offsets, self.size = location.offsets, location.nbytes
        for meta in manifest.tensors:
            at = self.offsets.get(meta.alias_of or meta.name, -1)
            if at < 0 or at % ALIGN or at + padded(meta.nbytes) > self.size:
                raise TransportError(f"the manifest places {meta.name} outside its segment", tensor=meta.name)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # one walk instead of a fault for each page
        self.map = mmap.mmap(file, max(self.size, 1), flags, mmap.PROT_READ)
        self.bytes: Bytes = np.frombuffer(self.map, np.uint8)

    def arrive(self, tensors: list[TensorMeta]) -> dict[str, int]:
        return digests(self.bytes[: self.size], tensors, self.offsets)

    def data(self, meta: TensorMeta) -> Bytes:
        at = self.offsets[meta.alias_of or meta.name]
        return self.bytes[at : at + meta.nbytes]

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(self.data(meta)) if meta.nbytes else torch.empty(0, dtype=torch.uint8)
        return flat.view(getattr(torch, meta.dtype)).view(meta.shape)

    def close(self) -> bool:
        self.bytes = np.empty(0, np.uint8)
        with suppress(BufferError):
            self.map.close()
        return self.map.closed
