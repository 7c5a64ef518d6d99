"""Tensors as one run of bytes (`plan.buckets.layout`), and which rank gives which elements of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from instep.plan.buckets import layout, padded
from instep.plan.shards import Piece, within
from instep.protocol import ITEM_BYTES, TensorMeta

Memory = Callable[[str], torch.Tensor]
"""This rank's part of a live tensor, flat."""


@dataclass(frozen=True)
class Run:
    """given: by rank, in the order of the tensors. A rank that follows knows its own alone."""

    tensors: Sequence[TensorMeta]
    given: Mapping[int, Sequence[Piece]]
    metas: dict[str, TensorMeta] = field(init=False)
    offsets: dict[str, int] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        offsets, size = layout(self.tensors)
        object.__setattr__(self, "metas", {meta.name: meta for meta in self.tensors if not meta.alias_of})
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "size", size)

    def parts(self, rank: int, low: int, high: int) -> Iterator[tuple[TensorMeta, Piece]]:
        """What `rank` gives of bytes `low` to `high`, which cut no element in two."""
        for piece in self.given[rank]:
            meta, at = self.metas[piece.tensor], self.offsets[piece.tensor]
            if at < high and at + meta.nbytes > low:
                size = ITEM_BYTES[meta.dtype]
                yield from ((meta, part) for part in within(piece, (max(low, at) - at) // size, (min(high, at + meta.nbytes) - at) // size))

    def nbytes(self, rank: int, low: int, high: int) -> int:
        return sum(room_of(meta, part) for meta, part in self.parts(rank, low, high))

    def spot(self, room: torch.Tensor, low: int, meta: TensorMeta, part: Piece) -> torch.Tensor:
        """Where a part belongs in `room`, which is the run from byte `low` on."""
        size = ITEM_BYTES[meta.dtype]
        first = self.offsets[meta.name] + size * part.target - low
        flat = room[first : first + size * ((part.rows - 1) * part.target_stride + part.row)].view(getattr(torch, meta.dtype))
        return flat.as_strided((part.rows, part.row), (part.target_stride, 1))

    def put(self, rank: int, memory: Memory, room: torch.Tensor, low: int, high: int) -> None:
        """Copies what `rank`, which is this one, gives of bytes `low` to `high` into `room`, cast to the dtypes of the tensors."""
        for meta, part in self.parts(rank, low, high):
            self.spot(room, low, meta, part).copy_(read(memory(part.live), part))

    def clear_gaps(self, room: torch.Tensor, low: int, high: int) -> None:
        """Zeros between the tensors: digests count on them."""
        for name, meta in self.metas.items():
            first, last = self.offsets[name] + meta.nbytes, self.offsets[name] + padded(meta.nbytes)
            if first < high and last > low:
                room[max(first, low) - low : min(last, high) - low] = 0


def read(memory: torch.Tensor, part: Piece) -> torch.Tensor:
    return memory.as_strided((part.rows, part.row), (part.source_stride, 1), int(memory.storage_offset()) + part.source)


def room_of(meta: TensorMeta, part: Piece) -> int:
    """Bytes that a part takes when parts lie one after the other, each from a multiple of eight on."""
    return -(-part.numel * ITEM_BYTES[meta.dtype] // 8) * 8


def packed(run: Run, rank: int, room: torch.Tensor, low: int, high: int) -> Iterator[tuple[TensorMeta, Piece, torch.Tensor]]:
    """What `rank` gives of bytes `low` to `high`, and where each part lies when they are sent together."""
    at = 0
    for meta, part in run.parts(rank, low, high):
        here = room[at : at + part.numel * ITEM_BYTES[meta.dtype]].view(getattr(torch, meta.dtype))
        yield meta, part, here.view(part.rows, part.row)
        at += room_of(meta, part)
