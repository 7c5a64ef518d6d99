"""Lays out a version's tensors in one run of bytes, and cuts that run into buckets. Pure
functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from instep.digest import BLOCK_BYTES
from instep.plan.rows import Rows, contiguous
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


def pieces(tensors: Sequence[TensorMeta], limit: int) -> Iterator[list[tuple[TensorMeta, Rows]]]:
    """Yields the contents of each bucket, in the order of `layout`: bytes of tensors, and where in
    the bucket they lie. A tensor may reach over several buckets."""
    offsets, size = layout(tensors)
    waiting = deque(meta for meta in tensors if not meta.alias_of)
    for low, high in buckets(size, limit):
        found = []
        while waiting and offsets[waiting[0].name] < high:
            meta = waiting[0]
            at = offsets[meta.name]
            start, stop = max(low - at, 0), min(high - at, meta.nbytes)
            if start < stop:
                found.append((meta, contiguous(stop - start, at + start - low, start)))
            if at + padded(meta.nbytes) > high:
                break
            waiting.popleft()
        yield found
