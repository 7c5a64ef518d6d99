"""Lays out a version's tensors in one run of bytes that only a CPU sums up.

    large tensors, each from a whole block on | small tensors side by side, ordered by their size

A small tensor fills no block of the digest, so its words are summed up alone. Tensors of one size
are rows of a matrix: one multiplication sums up all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from instep.digest import BLOCK_BYTES, Blocks, Bytes, Flags, Words, all_flags, all_sums, from_flags, outer_weight, seed_of
from instep.plan.buckets import layout
from instep.protocol import TensorMeta

ALIGN = 64
"""Bytes, a cache line: each small tensor begins at a multiple, and zeros follow it up to the
next."""


class Packed:
    """Where the tensors of a list lie. It follows from the list, so that both ends work it out.

    small: whether small tensors lie side by side. Otherwise all begin a block
    (`plan.buckets.layout`), as a GPU sums them up.
    offsets: in bytes, of each tensor that is no alias. edge: where small tensors begin. size: of
    all, in bytes.
    """

    def __init__(self, tensors: Sequence[TensorMeta], *, small: bool = True) -> None:
        self.tensors, self.small = list(tensors), small
        own = [meta for meta in tensors if not meta.alias_of]
        large = [meta for meta in own if meta.nbytes >= BLOCK_BYTES or not small]
        self.offsets, self.edge = layout(large)
        self.large, self.blocks = large, Blocks(large, self.offsets)
        self.shelves: list[Shelf] = []
        self.size = self.edge
        for width, some in groupby(sorted((meta for meta in own if meta.nbytes < BLOCK_BYTES), key=_width) if small else (), key=_width):
            shelf = Shelf(list(some), width, self.size)
            self.shelves.append(shelf)
            self.offsets |= {name: self.size + number * width for number, name in enumerate(shelf.names)}
            self.size += width * len(shelf.names)

    def digests(self, data: Bytes, share: tuple[int, int] = (0, 1)) -> dict[str, int]:
        """Returns the digest of each tensor in `data`. share: (index, count), to look at part
        `index` of `count` alone, and take the other bytes for zeros."""
        count = self.edge // BLOCK_BYTES
        low, high = _part(count, share)
        sums = np.zeros(count, np.uint64)
        sums[low:high] = all_sums(data[low * BLOCK_BYTES : high * BLOCK_BYTES])
        return self.with_sums(sums, data, share)

    def with_sums(self, sums: Words, data: Bytes, share: tuple[int, int] = (0, 1)) -> dict[str, int]:
        """Returns what `digests` does, where the sums of large tensors' blocks are known."""
        found = self.blocks.digests(sums)
        for shelf in self.shelves:
            found |= shelf.digests(data, share)
        return found

    def non_finite(self, flags: Mapping[str, Flags], data: Bytes) -> list[str]:
        """Returns the names of tensors with a NaN or an infinity. flags: of large tensors' blocks,
        by dtype."""
        return [*from_flags(flags, self.large, self.offsets), *(name for shelf in self.shelves for name in shelf.non_finite(data))]


class Shelf:
    """Small tensors that take `width` bytes each, side by side from byte `at` on."""

    def __init__(self, tensors: Sequence[TensorMeta], width: int, at: int) -> None:
        self.width, self.at = width, at
        self.names = [meta.name for meta in tensors]
        self.dtypes = np.array([meta.dtype for meta in tensors])
        self.seeds = np.array([seed_of(meta) for meta in tensors], np.uint64)
        self.outer = outer_weight(self.seeds)

    def digests(self, data: Bytes, share: tuple[int, int]) -> dict[str, int]:
        totals = self.seeds
        low, high = _part(len(self.names), share)
        if self.width and low < high:
            totals = totals.copy()
            totals[low:high] += all_sums(self._rows(data, low, high), self.width // 8) * self.outer[low:high]
        return dict(zip(self.names, totals.tolist(), strict=True))

    def non_finite(self, data: Bytes) -> list[str]:
        found = np.zeros(len(self.names), np.bool_)
        for dtype in set(self.dtypes.tolist()) if self.width else ():
            found |= all_flags(self._rows(data, 0, len(self.names)), dtype, self.width) & (self.dtypes == dtype)
        return [self.names[number] for number in found.nonzero()[0]]

    def _rows(self, data: Bytes, low: int, high: int) -> Bytes:
        return data[self.at + low * self.width : self.at + high * self.width]


_known: list[Packed] = []
"""The last few, which hold for an equal list: every push asks."""


def packed(tensors: Sequence[TensorMeta], *, small: bool = True) -> Packed:
    """Returns where the tensors lie. small: see `Packed`."""
    for known in tuple(_known):
        if known.small == small and known.tensors == tensors:
            return known
    made = Packed(tensors, small=small)
    _known[:] = [made, *_known[:3]]
    return made


def _width(meta: TensorMeta) -> int:
    return -(-meta.nbytes // ALIGN) * ALIGN


def _part(count: int, share: tuple[int, int]) -> tuple[int, int]:
    index, of = share
    return index * count // of, (index + 1) * count // of
