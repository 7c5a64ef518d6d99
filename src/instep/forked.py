"""Guards against forks. A forked child has its parent's memory and none of its threads, so it
shares nothing here: a lock would outlive the trainer in each child, and a push in a child would
wait for threads that are not there."""

from __future__ import annotations

import os
from contextlib import suppress

from instep.errors import ConfigError

_locks: set[int] = set()
"""Files that this process has locked: the kernel drops a lock when the last process that has the
file open closes it."""


def keep(file: int) -> int:
    """Registers a file descriptor that each forked child closes from now on, and returns it."""
    _locks.add(file)
    return file


def close(file: int) -> None:
    """Closes a file descriptor that `keep` registered. Does nothing in a child, which has closed
    it already."""
    if file in _locks:
        _locks.discard(file)
        os.close(file)


_child = False


def is_child() -> bool:
    """Whether this process was forked from one that had imported `instep`."""
    return _child


def _close_all() -> None:
    global _child
    _child = True
    while _locks:
        with suppress(OSError):
            os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_all)


class Own:
    """The process in which an object was made."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def here(self) -> bool:
        return os.getpid() == self.pid

    def check(self, what: str) -> None:
        """Raises `ConfigError` in a child that was forked."""
        if not self.here():
            raise ConfigError(
                f"this {what} is that of process {self.pid}: its threads and connections are not in"
                f" process {os.getpid()}, which was forked from it",
                next_step=f"make a {what} of its own in the child, or call the parent's in the parent",
            )
