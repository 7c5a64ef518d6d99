"""Whether the processes of other ranks are still there, as the kernel of their host knows it: nothing is asked of them."""

from __future__ import annotations

import os
import select
from contextlib import suppress

import msgspec

from instep.transport import host


class Liveness(msgspec.Struct, frozen=True):
    """A process: its host, on which others may know it by the number `pid` if they have the same `numbers`."""

    host: str
    numbers: str
    pid: int


def liveness() -> Liveness:
    """What others know this process by."""
    numbers = ""
    with suppress(OSError):
        numbers = os.readlink("/proc/self/ns/pid")
    return Liveness(host(), numbers, os.getpid())


class Watch:
    """Watches processes that this one can see, each by its rank. Others, and all where the kernel gives no such handles, are
    taken to be there."""

    def __init__(self) -> None:
        self.files: dict[int, int] = {}
        self.ended: set[int] = set()

    def see(self, rank: int, other: Liveness) -> None:
        """To be called soon after the process has said who it is, once or again."""
        me = liveness()
        if rank not in self.files and (other.host, other.numbers) == (me.host, me.numbers) and hasattr(os, "pidfd_open"):
            try:
                self.files[rank] = os.pidfd_open(other.pid)
            except ProcessLookupError:
                self.ended.add(rank)
            except OSError:  # the kernel does not allow it
                pass

    def gone(self, seconds: float = 0.0) -> set[int]:
        """The ranks whose processes have ended. Waits up to `seconds` for the first, where this process can see any."""
        poll = select.poll()
        for file in self.files.values():
            poll.register(file, select.POLLIN)
        ended = {file for file, _ in poll.poll(1000 * seconds if self.files and not self.ended else 0)}
        return self.ended | {rank for rank, file in self.files.items() if file in ended}

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1])
