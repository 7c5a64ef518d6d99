"""Elements in host memory that are sent as another dtype, cast a few at a time.

A few elements and what they are cast to stay in a core's cache, and PyTorch starts no threads of
its own for so few. PyTorch's loops differ in the NaN that they write, so a value that is cast twice
is cast by the same pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from instep.digest import Bytes

PIECE = 1 << 15
"""Elements that are cast at a time."""

memcmp = ctypes.CDLL(None).memcmp  # releases the GIL, and allocates nothing
memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class Cast:
    """Elements to be sent as `dtype`. values: flat and contiguous, in host memory. Counted and cut
    in bytes as they are sent."""

    values: torch.Tensor
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.values.numel() * self.dtype.itemsize

    def __getitem__(self, part: slice) -> Cast:
        low, high, _ = part.indices(self.size)
        return Cast(self.values[low // self.dtype.itemsize : high // self.dtype.itemsize], self.dtype)

    def write(self, room: Bytes) -> None:
        target = torch.from_numpy(room).view(self.dtype)
        for part, some in zip(torch.split(target, PIECE), self._pieces(), strict=True):
            part.copy_(some)

    def lies_at(self, address: int) -> bool:
        """Whether the bytes at an address are those that `write` writes."""
        made = torch.empty(PIECE, dtype=self.dtype)
        for some in self._pieces():
            made[: len(some)].copy_(some)
            size = len(some) * self.dtype.itemsize
            if memcmp(address, made.data_ptr(), size):
                return False
            address += size
        return True

    def _pieces(self) -> Iterator[torch.Tensor]:
        return iter(torch.split(self.values, PIECE))
