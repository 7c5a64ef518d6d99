"""Where a source's tensors lie in host memory. Later versions of tensors that lie where they lay
are copied from there, without asking for a tensor each.

A call of PyTorch takes a microsecond or more, and gives up the interpreter's lock. For a few KiB
that takes longer than the bytes do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from instep.digest import BLOCK_BYTES, Bytes
from instep.protocol import TensorMeta

SMALL = 64 << 10
"""Bytes up to which a strip is copied with the interpreter's lock held: a few microseconds."""

_libc = ctypes.PyDLL(None)  # does not give up the interpreter's lock
_memmove, _memcmp = _libc.memmove, _libc.memcmp
for _function in (_memmove, _memcmp):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p

Strip = tuple[int, int, int]
"""Offset in a version, address in this process, and bytes."""


class Strips:
    """Small runs of bytes of a version, and of other memory. Runs that go on where another ends are
    one."""

    def __init__(self, found: Iterable[Strip]) -> None:
        self.strips = _merged(sorted(found))
        self.nbytes = sum(size for _, _, size in self.strips)

    def give(self, version: int) -> None:
        """Copies all strips into the version at this address."""
        for offset, address, size in self.strips:
            _memmove(version + offset, address, size)

    def take(self, version: int) -> None:
        """Copies all strips out of the version at this address."""
        for offset, address, size in self.strips:
            _memmove(address, version + offset, size)

    def equal(self, version: int) -> bool:
        """Whether both memories hold the same bytes, in all strips."""
        return not any(_memcmp(address, version + offset, size) for offset, address, size in self.strips)


def _merged(strips: Sequence[Strip]) -> list[Strip]:
    """Joins strips that lie side by side at both ends, up to SMALL bytes."""
    found: list[Strip] = []
    for offset, address, size in strips:
        if found:
            first, start, length = found[-1]
            if first + length == offset and start + length == address and length + size <= SMALL:
                found[-1] = (first, start, length + size)
                continue
        found.append((offset, address, size))
    return found


class Addresses:
    """Tensors that lie in host memory as they are sent: contiguous, and in the dtype to send.

    place: `Placed.place` of the version in which they were given. small, large: how they are
    copied. The object does not keep their memory alive: `held` does.
    """

    def __init__(
        self, place: Hashable, tensors: Sequence[TensorMeta], offsets: Mapping[str, int], given: Sequence[tuple[TensorMeta, torch.Tensor]]
    ) -> None:
        self.place, self.tensors = place, tensors
        lie = [(meta, (offsets[meta.name], value.data_ptr(), meta.nbytes)) for meta, value in given]
        self.large = [(meta, strip) for meta, strip in lie if meta.nbytes >= BLOCK_BYTES]
        self._small = [(meta.name, strip) for meta, strip in lie if meta.nbytes < BLOCK_BYTES]
        self.small = Strips(strip for _, strip in self._small)
        storages = {storage.data_ptr(): storage for storage in (value.untyped_storage() for _, value in given)}
        self._bases = list(storages)
        self._storages = list(map(StorageWeakRef, storages.values()))

    def hold_for(self, place: Hashable, tensors: Sequence[TensorMeta]) -> bool:
        """Whether these tensors lie where they lay."""
        return place is not None and place == self.place and (tensors is self.tensors or tensors == self.tensors)

    def held(self) -> list[torch.UntypedStorage] | None:
        """Returns the memory, which stays for as long as the result is kept. None if some of it was
        freed: another thread may do that at any time."""
        found = [torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in self._storages]
        if any(storage is None for storage in found) or [storage.data_ptr() for storage in found] != self._bases:
            return None
        return found

    def different(self, version: int) -> str | None:
        """Returns a small tensor whose bytes are not those of the version at this address, or
        None."""
        if self.small.equal(version):
            return None
        return next(name for name, (offset, address, size) in self._small if _memcmp(address, version + offset, size))


def bytes_at(address: int, size: int) -> Bytes:
    """Returns a view of memory, which does not keep the memory alive."""
    room: Any = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(room, np.uint8)
