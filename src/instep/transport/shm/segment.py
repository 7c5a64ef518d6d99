"""Segments of shared memory, which the trainer's process owns.

A segment is a file in /dev/shm (elsewhere in the temporary directory, mapped the same way). The
trainer holds a lock on it for as long as it lives, and the kernel drops the lock when it dies: so
segments of a crashed trainer are told from living ones in any container, and `sweep` removes them.
When every engine has left a version its segment is used again for the next one: its pages are in
place already, and at most one copy of the model is held.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np

from instep.digest import Bytes
from instep.errors import TransportError
from instep.forked import close, keep

NAME = re.compile(r"instep-[0-9a-f]{32}")


def directory() -> Path:
    """Returns the directory of segments."""
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


class Segment:
    """A mapped and locked file."""

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
                # Opened a second time: a mapping keeps the lock of what it maps, also in a forked
                # child.
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
        """Renames the segment. Whoever still knows the old name finds nothing instead of another
        version."""
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
