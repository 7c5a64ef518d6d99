"""Digests of a version that passes by in buckets, and which of its tensors hold a number that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from instep.digest import BLOCK_BYTES, MASK, all_flags, all_sums, from_flags, from_sums, seed_of
from instep.digest_cuda import Table, added, in_one
from instep.plan.buckets import layout, pieces
from instep.protocol import TensorMeta

Result = tuple[dict[str, int], tuple[str, ...]]


class Tally(Protocol):
    def add(self, index: int, bucket: torch.Tensor) -> None:
        """Bucket `index` is complete: a flat tensor of bytes, laid out as `plan.buckets.pieces` says, zeros between tensors."""

    def result(self) -> Result:
        """When every bucket was added. Digest of each tensor by name; names of those that are not finite."""


class HostTally:
    """flags: whether numbers that are not finite are looked for."""

    def __init__(self, tensors: Sequence[TensorMeta], limit: int, *, flags: bool) -> None:
        self.own = [meta for meta in tensors if not meta.alias_of]
        self.offsets, size = layout(tensors)
        self.blocks = limit // BLOCK_BYTES
        self.sums = np.zeros(size // BLOCK_BYTES, np.uint64)
        self.flags = {dtype: np.zeros(len(self.sums), np.bool_) for dtype in {meta.dtype for meta in self.own}} if flags else {}

    def add(self, index: int, bucket: torch.Tensor) -> None:
        data = bucket.numpy()
        here = slice(index * self.blocks, index * self.blocks + data.size // BLOCK_BYTES)
        self.sums[here] = all_sums(data)
        for dtype, flags in self.flags.items():
            flags[here] = all_flags(data, dtype)

    def result(self) -> Result:
        flagged = from_flags(self.flags, self.own, self.offsets) if self.flags else []
        return from_sums(self.sums, self.own, self.offsets), tuple(flagged)


class DeviceTally:
    """The same on a GPU. rooms: where the buckets lie, in turn.

    Made before anything is sent: bringing tables to the GPU waits for what the current stream waits for, such as a peer that has died.
    """

    def __init__(self, tensors: Sequence[TensorMeta], limit: int, rooms: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.own = [meta for meta in tensors if not meta.alias_of]
        slots = {meta.name: slot for slot, meta in enumerate(self.own)}
        self.tables = []
        for index, here in enumerate(pieces(tensors, limit)):
            room = rooms[index % len(rooms)]
            runs = [in_one(room.data_ptr() + p.at, p.meta, slots[p.meta.name], start=p.start, stop=p.stop) for p in here]
            self.tables.append(Table(runs, len(slots), room.device, copy=False))

    def add(self, index: int, _: torch.Tensor) -> None:
        self.tables[index].launch()

    def result(self) -> Result:
        parts, flags = added(self.tables)
        digests = {meta.name: (seed_of(meta) + part) & MASK for meta, part in zip(self.own, parts, strict=True)}
        return digests, tuple(meta.name for meta, flag in zip(self.own, flags, strict=True) if flag)
