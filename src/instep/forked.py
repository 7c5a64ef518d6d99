"""A forked child has what its parent has in memory, and none of its threads. Nothing here is shared
with it: a lock would outlive the trainer in each child, and a push in a child would wait for threads
that are not there.
"""

from __future__ import annotations

import os
from contextlib import suppress

from instep.errors import ConfigError

_locks: set[int] = set()
"""Files that this process has locked: the kernel drops a lock when the last process that has the file
open closes it."""


def keep(file: int) -> int:
    """Returns the file descriptor, which is closed from now on in each child that is forked."""
    _locks.add(file)
    return file


def close(file: int) -> None:
    """Closes a file that `keep` was told of, unless a child has none of it."""
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
    """The process that something was made in."""

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
