"""Whether the processes of other ranks still run. The kernel of their host tells that, and the
processes are not asked."""

from __future__ import annotations

import os
import select
from contextlib import suppress

import msgspec

from instep.transport import host


class Liveness(msgspec.Struct, frozen=True):
    """Identifies a process: its host, its PID namespace (`numbers`), and its number there."""

    host: str
    numbers: str
    pid: int


def liveness() -> Liveness:
    """Returns how other processes can identify this one."""
    numbers = ""
    with suppress(OSError):
        numbers = os.readlink("/proc/self/ns/pid")
    return Liveness(host(), numbers, os.getpid())


class Watch:
    """Watches the processes of other ranks. A process on another host or in another PID namespace
    counts as alive, and so do all where the kernel has no pidfd."""

    def __init__(self) -> None:
        self.files: dict[int, int] = {}
        self.ended: set[int] = set()

    def see(self, rank: int, other: Liveness) -> None:
        """Starts to watch a process. Call it soon after the process has reported itself, before its
        number can be reused. A repeated call does nothing."""
        me = liveness()
        if rank not in self.files and (other.host, other.numbers) == (me.host, me.numbers) and hasattr(os, "pidfd_open"):
            try:
                self.files[rank] = os.pidfd_open(other.pid)
            except ProcessLookupError:
                self.ended.add(rank)
            except OSError:  # the kernel does not allow it
                pass

    def gone(self, seconds: float = 0.0) -> set[int]:
        """Returns the ranks whose processes have ended. Waits up to `seconds` for the first, if
        this process can see any."""
        poll = select.poll()
        for file in self.files.values():
            poll.register(file, select.POLLIN)
        ended = {file for file, _ in poll.poll(1000 * seconds if self.files and not self.ended else 0)}
        return self.ended | {rank for rank, file in self.files.items() if file in ended}

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1])
