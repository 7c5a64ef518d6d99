"""Which elements of a tensor lie where in the memory of each rank of a trainer. Pure functions.

A rank holds boxes of a live tensor: one, where it is sharded along dimensions (DTensor), or the few
that a range of the flat index space is made of (FSDP1, ZeRO-3). A checkpoint tensor is a live
tensor or a box of one. Boxes intersect in closed form, so what a rank holds of a checkpoint tensor
is a list of `Piece`: rows that a strided copy moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from instep.errors import SourceError
from instep.plan.region import Box, as_box, contiguous_stride, disjoint, simplify, whole
from instep.plan.rows import Rows, all_rows
from instep.protocol import Region, TensorMeta

Interval = tuple[int, int]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Rows of the tensor `tensor`, in what a rank holds of the live tensor `live`. Units:
    elements."""

    tensor: str
    live: str
    rows: Rows


@dataclass(frozen=True, slots=True)
class Extent:
    """A box of a live tensor that a rank holds: its element (i, j, ...), counted within the box, is
    element `at + i * stride[0] + j * stride[1] + ...` of the rank's memory."""

    box: Box
    at: int
    stride: tuple[int, ...]


def of_range(low: int, high: int, shape: Sequence[int], at: int = 0) -> list[Extent]:
    """Returns the extents of elements `low` to `high` of a tensor's flat index space, which lie in
    memory one after the other from `at` on."""
    stride = contiguous_stride(shape)
    return [
        Extent(box, at + sum(first * step for (first, _), step in zip(box, stride, strict=True)) - low, stride)
        for box in _boxes(low, high, tuple(shape))
    ]


def _boxes(low: int, high: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yields a range as boxes: the rest of its first row, whole rows, and the start of its last
    row."""
    if low >= high:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(low, inner), divmod(high, inner)
    if skipped or first == last:
        end = inner if first < last else rest
        yield from (((first, first + 1), *box) for box in _boxes(skipped, end, shape[1:]))
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if rest and first <= last:
        yield from (((last, last + 1), *box) for box in _boxes(0, rest, shape[1:]))


def of_intervals(intervals: Sequence[Sequence[Interval]]) -> list[Extent]:
    """Returns the extents of the elements whose index lies in one of the intervals in every
    dimension. The rank holds them as one contiguous tensor in their order."""
    stride = contiguous_stride([sum(high - low for low, high in some) for some in intervals])
    starts = [_starts(some) for some in intervals]
    return [
        Extent(
            tuple(some[index] for some, index in zip(intervals, chosen, strict=True)),
            sum(start[index] * step for start, index, step in zip(starts, chosen, stride, strict=True)),
            stride,
        )
        for chosen in product(*(range(len(some)) for some in intervals))
    ]


def _starts(intervals: Sequence[Interval]) -> list[int]:
    starts, at = [], 0
    for low, high in intervals:
        starts.append(at)
        at += high - low
    return starts


def ordered_box(view: Region, shape: Sequence[int]) -> Box | None:
    """Returns `view` as a box of a contiguous tensor of `shape`, with its elements in the same
    order. None where it is no such box."""
    box = as_box(view, shape)
    if box is None:
        return None
    first = sum(low * step for (low, _), step in zip(box, contiguous_stride(shape), strict=True))
    same = simplify(Region(first, tuple(high - low for low, high in box), contiguous_stride(shape)))
    return box if same == simplify(view) else None


def pieces(tensor: str, live: str, view: Box, extents: Sequence[Extent]) -> Iterator[Piece]:
    """Yields what a rank that holds `extents` of a live tensor holds of a tensor that is box `view`
    of the live one."""
    sizes = [high - low for low, high in view]
    for extent in extents:
        box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(view, extent.box, strict=True))
        if any(low >= high for low, high in box):
            continue
        shape = tuple(high - low for low, high in box)
        to, stride = _from(view, box), contiguous_stride(sizes)
        target = Region(sum(map(int.__mul__, to, stride)), shape, stride)
        source = Region(extent.at + sum(map(int.__mul__, _from(extent.box, box), extent.stride)), shape, extent.stride)
        yield from (Piece(tensor, live, rows) for rows in all_rows(target, source))


def _from(outer: Box, inner: Box) -> list[int]:
    return [low - start for (low, _), (start, _) in zip(inner, outer, strict=True)]


def share_out(tensors: Sequence[TensorMeta], held: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Chooses which pieces each rank gives, so that every element is given once. If ranks hold the
    same part, the first of them gives it.

    Raises `SourceError` naming the first tensor of which an element lies nowhere, or in two ranks
    that hold different parts.
    """
    given: list[list[Piece]] = [[] for _ in held]
    by_tensor: list[dict[str, list[Piece]]] = []
    for claims in held:
        by_tensor.append({})
        for piece in claims:
            by_tensor[-1].setdefault(piece.tensor, []).append(piece)
    for meta in tensors:
        if meta.alias_of:
            continue
        seen: set[frozenset[Region]] = set()
        regions: list[Region] = []
        for rank, claims_of in enumerate(by_tensor):
            own = claims_of.get(meta.name, [])
            part = frozenset(piece.rows.written for piece in own)
            if own and part not in seen:
                seen.add(part)
                regions += part
                given[rank] += own
        have = sum(region.numel for region in regions)
        if have < meta.numel:
            raise SourceError(f"the trainer's ranks hold {have} of the {meta.numel} elements of {meta.name}", tensor=meta.name)
        if have > meta.numel or not disjoint(regions, meta.shape):
            raise SourceError(f"ranks of the trainer hold parts of {meta.name} that overlap", tensor=meta.name)
    return given


def everything(shape: Sequence[int]) -> list[Extent]:
    """Returns the extents of a whole contiguous tensor."""
    return [Extent(tuple((0, size) for size in shape), 0, whole(shape).stride)]
