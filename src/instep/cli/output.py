"""Output of commands, and how a command ends when nobody reads its output any more."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

NO_TERMINAL_WIDTH = 240


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM act like Ctrl-C in this block: processes that it started end, engines that
    it pushes to go on."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def console() -> Console:
    """Returns a console for results on stdout. If stdout is no terminal, lines are not cut to a
    terminal's width."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else NO_TERMINAL_WIDTH)


def outputs() -> list[int]:
    """Returns duplicates of stdout and stderr as they are now: rich replaces one whose reader
    has left."""
    found = []
    for descriptor in (1, 2):
        with suppress(OSError):  # it was closed when this process started
            found.append(os.dup(descriptor))
    return found


def reader_left(descriptors: Iterable[int]) -> bool:
    """Whether the reader of one of them has left, as after `instep doctor | head -1`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def end_by_sigpipe() -> NoReturn:
    """Ends this process silently by SIGPIPE, as other Unix tools do: a shell sees 141."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still holds back
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)  # where a parent blocks the signal
