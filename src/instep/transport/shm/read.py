"""A worker's side of shared memory: maps the segment of a version read-only."""

from __future__ import annotations

import os
import stat

from instep.errors import TransportError
from instep.protocol import Manifest, TensorMeta
from instep.transport.mapped import Mapped
from instep.transport.reader import WorkerContext
from instep.transport.shm import segment

AT_ONCE = 1 << 20
"""Bytes of a version that a worker sums up in less than a millisecond."""


class ShmReader(Mapped):
    """A worker's side: maps the segment that a manifest names."""

    def __init__(self, manifest: Manifest, me: WorkerContext) -> None:
        location, self.share, self.split = manifest.location, me.share, me.share[1] > 1
        self.at_once = self.brief(location.nbytes)
        if not segment.NAME.fullmatch(location.address):
            raise TransportError(f"{location.address!r} is not a segment's name")
        try:
            file = os.open(segment.directory() / location.address, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(
                f"cannot open the trainer's shared memory {location.address}: {error.strerror}",
                next_step="shm needs trainer and engine on one host that share /dev/shm (docker: --ipc=host or --ipc=container:...)",
            ) from error
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size < location.nbytes:
                raise TransportError(f"segment {location.address} has {found.st_size} bytes, the manifest says {location.nbytes}")
            super().__init__(manifest, file)
        finally:
            os.close(file)

    @staticmethod
    def brief(nbytes: int) -> bool:
        return nbytes <= AT_ONCE

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        """Sums up this worker's share of the bytes. Workers of one engine map the same pages, so
        together they look at each page once."""
        return self.places.digests(self.bytes, self.share)
