"""Strided rows of a tensor in some memory: the overlap of two of them, and the kernel's copies
between them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from instep.digest import seed_of
from instep.digest_cuda import Run
from instep.plan.buckets import cut
from instep.protocol import ITEM_BYTES, Place, TensorMeta


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of `length` units each, which do not overlap. Row `i` begins at `at + i * stride` of a tensor's flat index space and at
    `place + i * place_stride` of some memory."""

    count: int
    length: int
    at: int
    stride: int
    place: int
    place_stride: int

    def part(self, row: int, column: int, count: int, length: int) -> Rows:
        """Returns `count` rows from `row` on, and `length` units of each from `column` on."""
        at, place = self.at + row * self.stride + column, self.place + row * self.place_stride + column
        return Rows(count, length, at, self.stride, place, self.place_stride)

    def in_words(self, size: int, address: int) -> Rows | None:
        """Converts elements of `size` bytes to words of 8 bytes, and places relative to `address`
        to absolute ones. None where that would cut a word."""
        place = address + size * self.place
        numbers = [size * self.length, size * self.at, size * self.stride, place, size * self.place_stride]
        return None if any(number % 8 for number in numbers) else Rows(self.count, *(number // 8 for number in numbers))


def contiguous(count: int, place: int) -> Rows:
    """Returns all of a tensor of `count` units, which lie one after the other from `place` on."""
    return Rows(1, count, 0, count, place, count)


def common(a: Rows, b: Rows) -> Iterator[tuple[Rows, Rows]]:
    """Yields the elements of the tensor that are in both, each once. They come as a pair of rows,
    with places in the memory of `a` and in that of `b`."""
    if b.count == 1:
        yield from _within(a, b)
    elif a.count == 1:
        yield from ((mine, theirs) for theirs, mine in _within(b, a))
    elif a.stride == b.stride:
        yield from _side_by_side(a, b)
    else:
        for row in range(a.count):
            yield from common(a.part(row, 0, 1, a.length), b)


def _within(a: Rows, b: Rows) -> Iterator[tuple[Rows, Rows]]:
    """Yields the elements of `a` that lie in the only row of `b`."""
    for row, column, count, length in cut(a.at, a.count, a.length, a.stride, b.at, b.at + b.length):
        mine = a.part(row, column, count, length)
        yield mine, Rows(count, length, mine.at, mine.stride, b.place + mine.at - b.at, mine.stride)


def _side_by_side(a: Rows, b: Rows) -> Iterator[tuple[Rows, Rows]]:
    """Yields the overlap of rows of one stride. Each row of `b` meets at most two rows of `a` that
    follow each other, and all rows meet in the same way."""
    ahead, column = divmod(b.at - a.at, a.stride)
    for shift, start in ((ahead, column), (ahead + 1, column - a.stride)):  # row i of b begins at column `start` of row i + shift of a
        low, high = max(start, 0), min(start + b.length, a.length)
        first, last = max(shift, 0), min(a.count, b.count + shift)
        if low < high and first < last:
            yield a.part(first, low, last - first, high - low), b.part(first - shift, low - start, last - first, high - low)


def rows_of_place(place: Place, meta: TensorMeta, base: int) -> Rows:
    """Returns a place in words of 8 bytes, its end padded to a whole word. base: address of its
    allocation in this process."""
    (count, length), (stride, _) = place.part.shape, place.part.stride
    numbers = (ITEM_BYTES[meta.dtype] * number for number in (length, place.part.offset, stride, place.stride))
    length, at, stride, place_stride = (-(-number // 8) for number in numbers)
    return Rows(count, length, at, stride, (base + place.at) // 8, place_stride)


def run_of(rows: Rows, meta: TensorMeta, slot: int, into: Rows | None = None) -> Run:
    """Makes the kernel's description of a copy. rows: words to read. into: the same rows at the
    target; None to sum up without a copy."""
    target, stride = (0, 0) if into is None else (8 * into.place, into.place_stride)
    source = 8 * rows.place
    return Run(source, target, rows.count, rows.length, rows.place_stride, stride, rows.at, rows.stride, seed_of(meta), slot, meta.dtype)
