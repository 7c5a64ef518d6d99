"""Lays out a version's tensors in one run of bytes, and cuts that run into buckets. Pure
functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from instep.digest import BLOCK_BYTES
from instep.protocol import TensorMeta

ALIGN = BLOCK_BYTES  # so that digests of all tensors are taken in one pass, and no block lies in two buckets


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def layout(tensors: Iterable[TensorMeta]) -> tuple[dict[str, int], int]:
    """Returns the byte offset of each tensor that is not an alias, one after the other, and the
    total size in bytes."""
    offsets, end = {}, 0
    for meta in tensors:
        if not meta.alias_of:
            offsets[meta.name] = end
            end += padded(meta.nbytes)
    return offsets, end


def buckets(size: int, limit: int) -> list[tuple[int, int]]:
    """Returns intervals that cover `size` bytes, each of at most `limit` bytes. limit: a multiple
    of ALIGN."""
    return [(low, min(low + limit, size)) for low in range(0, size, limit)]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop` of a tensor, which lie at byte `at` of a bucket."""

    meta: TensorMeta
    start: int
    stop: int
    at: int


def pieces(tensors: Sequence[TensorMeta], limit: int) -> Iterator[list[Piece]]:
    """Yields the contents of each bucket, in the order of `layout`. A tensor may reach over several
    buckets."""
    offsets, size = layout(tensors)
    waiting = deque(meta for meta in tensors if not meta.alias_of)
    for low, high in buckets(size, limit):
        found = []
        while waiting and offsets[waiting[0].name] < high:
            meta = waiting[0]
            at = offsets[meta.name]
            start, stop = max(low - at, 0), min(high - at, meta.nbytes)
            if start < stop:
                found.append(Piece(meta, start, stop, at + start - low))
            if at + padded(meta.nbytes) > high:
                break
            waiting.popleft()
        yield found


def cut(first: int, rows: int, row: int, stride: int, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the parts of a strided run that lie in the interval from `low` to `high`.

    The run has `rows` rows of `row` words, which begin at `first` and then `stride` words apart; rows do not overlap. Yields (index of a
    row, column in it, number of rows from it on, words of each from that column on): whole rows together, rows that are cut alone.
    """
    if not rows or not row:
        return
    begin = max(0, (low - first - row) // stride + 1)
    end = min(rows, -((first - high) // stride))
    while begin < end:
        at = first + begin * stride
        left, right = max(low - at, 0), min(high - at, row)
        if left == 0 and right == row:
            whole = min(end, (high - first - row) // stride + 1) - begin
            yield begin, 0, whole, row
            begin += whole
        else:
            yield begin, left, 1, right - left
            begin += 1
