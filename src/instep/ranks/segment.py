"""A shared segment that every rank of a trainer writes to: each element is copied once, from its
shard to its place in the version.

Workers find whole tensors and need to know nothing of shards. The segment is the only memory beside
the trainer's own. When all ranks have written, each reads what it gave once more and compares (see
`transport.again`). Digests are taken of what was written, and each rank sums up an equal part of
the segment.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import msgspec
import numpy as np

from instep.digest import BLOCK_BYTES, Bytes, all_flags, all_sums, from_flags, from_sums
from instep.errors import TransportError
from instep.protocol import TensorMeta
from instep.ranks.run import Run
from instep.transport.bucket_digests import Result
from instep.transport.shm.segment import directory


class Write(msgspec.Struct, frozen=True):
    """Asks a rank to write what it gives to the segment of this name. tensors: all tensors, in the
    dtypes to write."""

    segment: str
    tensors: list[TensorMeta]


class Sums(msgspec.Struct, frozen=True):
    """Sums of a stretch of blocks as 64-bit words and, for each dtype, whether a block holds a
    number that is not finite."""

    sums: bytes
    flags: dict[str, bytes]


class Window:
    """A rank's mapping of a segment that rank 0 has made. The mapping stays while rank 0 uses the
    same memory again."""

    def __init__(self) -> None:
        self.file: tuple[int, int] | None = None
        self.view: Bytes = np.empty(0, np.uint8)

    def open(self, name: str, size: int) -> Bytes:
        """Maps a segment. Raises `TransportError` where this process cannot open it."""
        try:
            file = os.open(directory() / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"cannot open rank 0's shared memory {name}: {error.strerror}") from error
        try:
            found = os.fstat(file)
            if self.file != (found.st_dev, found.st_ino):
                self.view = np.empty(0, np.uint8)  # unmapped with the last view
                self.view, self.file = np.frombuffer(mmap.mmap(file, found.st_size), np.uint8), (found.st_dev, found.st_ino)
        finally:
            os.close(file)
        if len(self.view) < size:
            raise TransportError(f"segment {name} has {len(self.view)} bytes, {size} are needed")
        return self.view[:size]

    def close(self) -> None:
        self.file, self.view = None, np.empty(0, np.uint8)


def sum_up(view: Bytes, run: Run, rank: int, ranks: int) -> Sums:
    """Sums up this rank's share of a segment."""
    blocks = run.size // BLOCK_BYTES
    data = view[rank * blocks // ranks * BLOCK_BYTES : (rank + 1) * blocks // ranks * BLOCK_BYTES]
    dtypes = sorted({meta.dtype for meta in run.metas.values()})
    return Sums(all_sums(data).tobytes(), {dtype: all_flags(data, dtype).tobytes() for dtype in dtypes})


def add_up(run: Run, found: Sequence[Sums]) -> Result:
    """Returns digests and the names of tensors that are not finite, from the sums of every rank."""
    own = list(run.metas.values())
    sums = np.frombuffer(b"".join(one.sums for one in found), np.uint64)
    flags = {dtype: np.frombuffer(b"".join(one.flags[dtype] for one in found), np.bool_) for dtype in found[0].flags}
    return from_sums(sums, own, run.offsets), tuple(from_flags(flags, own, run.offsets))
