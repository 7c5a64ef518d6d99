"""Strided rows: which units of a tensor lie where, in one memory or in two. Pure functions of
numbers. A unit is an element, a byte, or a word of 8 bytes; every number of one `Rows` has the
same."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from instep.protocol import ITEM_BYTES, Place, Region, TensorMeta


class Rows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` rows of `length` units each, which do not overlap. Row `i` begins at `at + i *
    stride` of a tensor's flat index space and at `place + i * place_stride` of the memory that has
    the row. Rows of a copy go to `target + i * target_stride` of another memory."""

    count: int
    length: int
    at: int
    stride: int
    place: int
    place_stride: int
    target: int = 0
    target_stride: int = 0

    @property
    def numel(self) -> int:
        return self.count * self.length

    @property
    def end(self) -> int:
        """The unit of the memory after the last one of the rows."""
        return self.place + (self.count - 1) * self.place_stride + self.length

    @property
    def written(self) -> Region:
        """The units of the tensor."""
        return Region(self.at, (self.count, self.length), (self.stride, 1))

    @property
    def read(self) -> Region:
        """The units of the memory."""
        return Region(self.place, (self.count, self.length), (self.place_stride, 1))

    def part(self, row: int, column: int, count: int, length: int) -> Rows:
        """Returns `count` rows from `row` on, and `length` units of each from `column` on."""
        at, place = self.at + row * self.stride + column, self.place + row * self.place_stride + column
        target = self.target + row * self.target_stride + column
        return Rows(count, length, at, self.stride, place, self.place_stride, target, self.target_stride)

    def moved(self, place: int) -> Rows:
        """Returns the rows of the same memory where it begins `place` units later."""
        return Rows(self.count, self.length, self.at, self.stride, self.place + place, self.place_stride, self.target, self.target_stride)

    def into(self, target: Rows) -> Rows:
        """Returns the copy of these rows to where `target` has the same ones."""
        return Rows(self.count, self.length, self.at, self.stride, self.place, self.place_stride, target.place, target.place_stride)

    def in_words(self, size: int, address: int) -> Rows | None:
        """Converts units of `size` bytes to words of 8 bytes, and places relative to `address` to
        absolute ones. None where that would cut a word. Targets are left out."""
        place = address + size * self.place
        numbers = [size * self.length, size * self.at, size * self.stride, place, size * self.place_stride]
        return None if any(number % 8 for number in numbers) else Rows(self.count, *(number // 8 for number in numbers))

    def in_padded_words(self) -> Rows:
        """Converts bytes to words of 8 bytes, of which the last one may reach past the end."""
        numbers = (self.length, self.at, self.stride, self.place, self.place_stride, self.target, self.target_stride)
        return Rows(self.count, *(-(-number // 8) for number in numbers))

    def within(self, low: int, high: int) -> Iterator[Rows]:
        """Yields the parts that lie in units `low` to `high` of the tensor."""
        return self._cut(self.at, self.stride, low, high)

    def stored(self, low: int, high: int) -> Iterator[Rows]:
        """Yields the parts that lie in units `low` to `high` of the memory."""
        return self._cut(self.place, self.place_stride, low, high)

    def _cut(self, first: int, stride: int, low: int, high: int) -> Iterator[Rows]:
        """Yields whole rows together, and rows that are cut alone. first, stride: where rows begin
        in the space that `low` and `high` count."""
        if not self.numel:
            return
        begin = max(0, (low - first - self.length) // stride + 1)
        end = min(self.count, -((first - high) // stride))
        while begin < end:
            at = first + begin * stride
            left, right = max(low - at, 0), min(high - at, self.length)
            whole = left == 0 and right == self.length
            count = min(end, (high - first - self.length) // stride + 1) - begin if whole else 1
            yield self.part(begin, left, count, right - left)
            begin += count


def contiguous(length: int, place: int, at: int = 0, target: int = 0) -> Rows:
    """Returns units `at` to `at + length` of a tensor, which lie one after the other from `place`
    on, and go to `target` and the units after it."""
    return Rows(1, length, at, length, place, length, target, length)


def rows_of(tensor: Region, memory: Region) -> Rows | None:
    """Returns regions of one shape as rows, which are contiguous on both sides. None where one
    constant stride on each side does not express them."""
    axes: list[list[int]] = []  # size, stride in the tensor and in memory; outermost first
    for size, step, other in zip(tensor.shape, tensor.stride, memory.stride, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * step and axes[-1][2] == size * other:
            axes[-1] = [axes[-1][0] * size, step, other]
        else:
            axes.append([size, step, other])
    axes = axes or [[1, 1, 1]]
    if axes[-1][1:] != [1, 1] or len(axes) > 2:
        return None
    length = axes[-1][0]
    count, stride, place_stride = axes[0] if len(axes) == 2 else (1, length, length)
    return Rows(count, length, tensor.offset, stride, memory.offset, place_stride)


def all_rows(tensor: Region, memory: Region) -> Iterator[Rows]:
    """Yields regions of one shape as rows, of as many strides as they take."""
    found = rows_of(tensor, memory)
    if found is not None:
        yield found
        return
    for index in range(tensor.shape[0]):  # one dimension less
        yield from all_rows(*(Region(one.offset + index * one.stride[0], one.shape[1:], one.stride[1:]) for one in (tensor, memory)))


def common(source: Rows, target: Rows) -> Iterator[Rows]:
    """Yields the copies of what is in both, each unit of the tensor once: from the memory of
    `source` to that of `target`."""
    if source.count == 1:
        yield from (_in_row(source, some).into(some) for some in target.within(source.at, source.at + source.length))
    elif target.count == 1:
        yield from (some.into(_in_row(target, some)) for some in source.within(target.at, target.at + target.length))
    elif source.stride == target.stride:
        yield from _side_by_side(source, target)
    else:
        for row in range(target.count):
            yield from common(source, target.part(row, 0, 1, target.length))


def _in_row(row: Rows, some: Rows) -> Rows:
    """Returns the units of `some` where `row` has them, which is a single row."""
    return Rows(some.count, some.length, some.at, some.stride, row.place + some.at - row.at, some.stride)


def _side_by_side(a: Rows, b: Rows) -> Iterator[Rows]:
    """Yields the copies of rows of one stride. Each row of `b` meets at most two rows of `a` that
    follow each other, and all rows meet in the same way."""
    ahead, column = divmod(b.at - a.at, a.stride)
    for shift, start in ((ahead, column), (ahead + 1, column - a.stride)):  # row i of b begins at column `start` of row i + shift of a
        low, high = max(start, 0), min(start + b.length, a.length)
        first, last = max(shift, 0), min(a.count, b.count + shift)
        if low < high and first < last:
            there = b.part(first - shift, low - start, last - first, high - low)
            yield a.part(first, low, last - first, high - low).into(there)


def of_place(place: Place, meta: TensorMeta, base: int) -> Rows:
    """Returns what a message says of a part, in words of 8 bytes. base: address of its allocation
    in this process."""
    (count, length), (stride, _) = place.part.shape, place.part.stride
    length, at, stride, place_stride = (ITEM_BYTES[meta.dtype] * number for number in (length, place.part.offset, stride, place.stride))
    return Rows(count, length, at, stride, base + place.at, place_stride).in_padded_words()
