"""POSIX shared memory: the trainer copies each tensor once into a segment, workers map it read-only and load from views of it.

A segment is a file in /dev/shm (elsewhere in the temporary directory, mapped the same way). The trainer holds a lock on it for as long
as it lives, and the kernel drops the lock when it dies: so segments of a crashed trainer are told from living ones in any container, and
`sweep` removes them. When every engine has left a version its segment is used again for the next one: its pages are in place already, and
at most one copy of the model is held.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
import tempfile
import uuid
import weakref
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from instep.digest import BLOCK_BYTES, Bytes, all_sums, cores, from_sums
from instep.errors import TransportError
from instep.forked import Own, close, keep
from instep.plan.buckets import layout
from instep.protocol import Identity, Location, Manifest, TensorMeta
from instep.transport import Placed, Published, Pull, WorkerContext, elsewhere
from instep.transport.bucket_digests import Result
from instep.transport.copying import copied
from instep.transport.mapped import Mapped

NAME = re.compile(r"instep-[0-9a-f]{32}")


def directory() -> Path:
    """Where segments live."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def sweep() -> list[str]:
    """Removes the segments of trainers that died. Returns their names."""
    removed = []
    for path in directory().glob("instep-*"):
        if not NAME.fullmatch(path.name):
            continue
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the trainer lives
                path.unlink()
            removed.append(path.name)
        except OSError:
            continue
    return removed


class ShmTransport(Pull):
    """The trainer's side. One segment per version; `release_all_but` hands segments over to the next version."""

    kind = "shm"

    def __init__(self) -> None:
        sweep()
        self.own = Own()
        self.segments: dict[str, Segment] = {}
        self.free: list[Segment] = []
        self.pool = ThreadPoolExecutor(max_workers=cores())
        self._at_exit = weakref.finalize(self, _close, self.segments, self.free, self.own)

    def why_not(self, _: torch.device, workers: Sequence[Identity]) -> str | None:
        return elsewhere(workers)

    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        if not self._at_exit.alive:
            raise TransportError("the WeightSync was closed", next_step="make a new one")
        offsets, size = layout(tensors)
        segment = self._segment(size)
        try:
            found = self._brought(segment, tensors, values)
        except BaseException:
            self._take_back(segment)
            raise
        self.segments[segment.name] = segment
        return Published(Location(self.kind, segment.name, size, offsets), *found)

    def _brought(self, segment: Segment, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Result:
        """Fills a segment. Digests and names of tensors that are not finite are those of the copies: what a trainer does to its tensors
        afterwards cannot change what is sent."""
        return copied(segment.view, tensors, Placed.of(values), self.pool)

    def _take_back(self, segment: Segment) -> None:
        """One that was not filled."""
        self.free.append(segment)

    def _segment(self, size: int) -> Segment:
        for segment in self.free:
            if segment.size >= size:
                self.free.remove(segment)
                return segment
        while self.free:
            self.free.pop().close()
        return self.new_segment(size)

    def new_segment(self, size: int) -> Segment:
        return Segment(size)

    def finish(self, published: Published) -> Published:
        return published

    def release_all_but(self, held: Set[str]) -> None:
        for address in self.segments.keys() - held:
            self.free.append(self.segments.pop(address).renamed())

    def close(self) -> None:
        self._at_exit()
        self.pool.shutdown(wait=False)


def _close(segments: dict[str, Segment], free: list[Segment], own: Own) -> None:
    """Runs once: when the transport is closed, collected, or the trainer ends without either. A forked child owns nothing."""
    if own.here():
        for segment in (*segments.values(), *free):
            segment.close()
        segments.clear()
        free.clear()


class Segment:
    """A mapped, locked file."""

    def __init__(self, size: int) -> None:
        self.size = max(size, mmap.PAGESIZE)
        self.name = f"instep-{uuid.uuid4().hex}"
        self.path = directory() / self.name
        try:
            free = os.statvfs(directory())
            if free.f_bavail * free.f_frsize < self.size:
                raise TransportError(
                    f"{directory()} has {free.f_bavail * free.f_frsize >> 20} MiB free, the model needs {-(-self.size >> 20)} MiB",
                    next_step="give it more room (docker run --shm-size=..., or mount -o remount,size=...) or remove what fills it",
                )
            unlocked = self.path.with_suffix(".new")  # a sweep between creation and lock must not know it
            self.lock = keep(os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            try:
                fcntl.flock(self.lock, fcntl.LOCK_SH)
                unlocked.rename(self.path)
                # Opened a second time: a mapping keeps the lock of what it maps, also in a forked child.
                file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                unlocked.unlink(missing_ok=True)
                self._unlink()
                raise
        except OSError as error:
            raise TransportError(
                f"cannot make a file in {directory()}: {error.strerror}", next_step="let this user write to /dev/shm, or set TMPDIR"
            ) from error
        try:
            os.posix_fallocate(file, 0, self.size) if hasattr(os, "posix_fallocate") else os.ftruncate(file, self.size)
            self.map = mmap.mmap(file, self.size)
        except OSError as error:
            self._unlink()
            raise TransportError(f"cannot map {self.size >> 20} MiB in {directory()}: {error}") from error
        finally:
            os.close(file)
        self.view: Bytes = np.frombuffer(self.map, np.uint8)

    def renamed(self) -> Segment:
        """The same memory under a new name: who still knows the old one finds nothing instead of another version."""
        name = f"instep-{uuid.uuid4().hex}"
        self.path = self.path.rename(directory() / name)
        self.name = name
        return self

    def _unlink(self) -> None:
        self.path.unlink(missing_ok=True)
        close(self.lock)

    def close(self) -> None:
        self._unlink()
        del self.view
        with suppress(BufferError):  # unmapped with the last view
            self.map.close()


class ShmReader(Mapped):
    """A worker's side: the segment of one manifest."""

    def __init__(self, manifest: Manifest, me: WorkerContext) -> None:
        location, self.share, self.split = manifest.location, me.share, me.share[1] > 1
        if not NAME.fullmatch(location.address):
            raise TransportError(f"{location.address!r} is not a segment's name")
        try:
            file = os.open(directory() / location.address, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
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

    def arrive(self, tensors: list[TensorMeta]) -> dict[str, int]:
        """Workers of one engine map the same pages: together they look at each once."""
        sums = np.zeros(self.size // BLOCK_BYTES, np.uint64)
        low, high = (part * len(sums) // self.share[1] for part in (self.share[0], self.share[0] + 1))
        sums[low:high] = all_sums(self.bytes[low * BLOCK_BYTES : high * BLOCK_BYTES])
        return from_sums(sums, tensors, self.offsets)
