"""Tensors as one run of bytes (`plan.buckets.layout`), and which rank gives which elements of
them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter

import torch

from instep.errors import SourceError
from instep.plan.buckets import layout, padded
from instep.plan.region import view
from instep.plan.shards import Piece
from instep.protocol import ITEM_BYTES, TensorMeta

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes to compare bits with: a NaN is not equal to itself."""

Memory = Callable[[str], torch.Tensor]
"""This rank's part of a live tensor, flat."""


class Run:
    """Tensors laid out one after the other. given: the pieces of each rank, in the order of the
    tensors. A rank that follows knows its own pieces alone. Nothing of it changes."""

    def __init__(self, tensors: Sequence[TensorMeta], given: Mapping[int, Sequence[Piece]]) -> None:
        self.tensors, self.given = tensors, given
        self.metas = {meta.name: meta for meta in tensors if not meta.alias_of}
        self.offsets, self.size = layout(tensors)
        ends = {name: self.offsets[name] + meta.nbytes for name, meta in self.metas.items()}
        self._ends = {rank: [ends[piece.tensor] for piece in pieces] for rank, pieces in given.items()}
        """By rank, where the tensor of each piece ends, in ascending order."""
        self._gaps = [(end, self._end(self.metas[name])) for name, end in ends.items() if end < self._end(self.metas[name])]
        """Bytes between tensors."""

    def stretches(self, names: Sequence[str]) -> Iterator[tuple[int, int, list[TensorMeta]]]:
        """Yields the byte ranges of these tensors, with the tensors in each. Adjacent tensors share
        a range."""
        together: list[TensorMeta] = []
        for name in sorted(names, key=self.offsets.__getitem__):
            if together and self._end(together[-1]) < self.offsets[name]:
                yield self.offsets[together[0].name], self._end(together[-1]), together
                together = []
            together.append(self.metas[name])
        if together:
            yield self.offsets[together[0].name], self._end(together[-1]), together

    def _end(self, meta: TensorMeta) -> int:
        return self.offsets[meta.name] + padded(meta.nbytes)

    def parts(self, rank: int, low: int, high: int) -> Iterator[tuple[TensorMeta, Piece]]:
        """Yields what `rank` gives of bytes `low` to `high`. The bounds cut no element in two."""
        for piece in islice(self.given[rank], bisect_right(self._ends[rank], low), None):
            meta, at = self.metas[piece.tensor], self.offsets[piece.tensor]
            if at >= high:
                return
            size = ITEM_BYTES[meta.dtype]
            first, last = (max(low, at) - at) // size, (min(high, at + meta.nbytes) - at) // size
            yield from ((meta, Piece(piece.tensor, piece.live, rows)) for rows in piece.rows.within(first, last))

    def packed(self, rank: int, low: int, high: int) -> Iterator[tuple[TensorMeta, Piece, int]]:
        """Yields what `rank` gives of bytes `low` to `high`, with each part's offset when the parts
        are sent together. Parts lie one after the other, each at a multiple of its item size.
        Blocks of two tensors never overlap, so that all take at most `high - low` bytes."""
        at = 0
        for meta, part in self.parts(rank, low, high):
            size = ITEM_BYTES[meta.dtype]
            at = -(-at // size) * size
            yield meta, part, at
            at += part.rows.numel * size

    def nbytes(self, rank: int, low: int, high: int) -> int:
        """Returns the size in bytes of these parts when they are sent together."""
        return max((at + part.rows.numel * ITEM_BYTES[meta.dtype] for meta, part, at in self.packed(rank, low, high)), default=0)

    def slices(self, rank: int, low: int, high: int, step: int) -> Iterator[tuple[int, int]]:
        """Halves bytes `low` to `high` until `rank` gives at most `step` bytes of each slice.
        Slices of which it gives nothing are left out.

        step: at least ALIGN.
        """
        size = self.nbytes(rank, low, high)
        if size > step:
            middle = low + padded((high - low) // 2)
            yield from self.slices(rank, low, middle, step)
            yield from self.slices(rank, middle, high, step)
        elif size:
            yield low, high

    def spot(self, room: torch.Tensor, low: int, meta: TensorMeta, part: Piece) -> torch.Tensor:
        """Returns the view of a part in `room`, which is the run from byte `low` on."""
        rows, size = part.rows, ITEM_BYTES[meta.dtype]
        first = self.offsets[meta.name] + size * rows.at - low
        flat = room[first : first + size * ((rows.count - 1) * rows.stride + rows.length)].view(getattr(torch, meta.dtype))
        return flat.as_strided((rows.count, rows.length), (rows.stride, 1))

    def put(self, rank: int, memory: Memory, room: torch.Tensor, low: int, high: int) -> None:
        """Copies what this rank gives of bytes `low` to `high` into `room`, cast to the dtypes of
        the tensors. rank: this rank."""
        for meta, part in self.parts(rank, low, high):
            self.spot(room, low, meta, part).copy_(view(memory(part.live), part.rows.read))

    def compare(self, rank: int, memory: Memory, room: torch.Tensor) -> None:
        """Reads again what this rank has put into `room`, which is the whole run. Raises
        `SourceError` for the first tensor that has changed. rank: this rank."""
        for meta, part in self.parts(rank, 0, self.size):
            there, own = self.spot(room, 0, meta, part), view(memory(part.live), part.rows.read)
            bits = BITS[ITEM_BYTES[meta.dtype]]
            if not torch.equal(there.view(bits), own.to(there.device, there.dtype).view(bits)):
                raise SourceError.changed(meta.name)

    def clear_gaps(self, room: torch.Tensor, low: int, high: int) -> None:
        """Writes zeros between the tensors, because digests count them."""
        for first, last in islice(self._gaps, bisect_right(self._gaps, low, key=itemgetter(1)), None):
            if first >= high:
                return
            room[max(first, low) - low : min(last, high) - low] = 0
