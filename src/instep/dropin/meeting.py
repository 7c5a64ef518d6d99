"""How the ranks of a group meet for a broadcast, in the group's store, before the first byte is
sent.

A collective that has begun cannot be taken back: a rank that never comes ends the group. So its
sender asks in the store who is there, and begins when all are. Until then the broadcast can be
called off: its ranks raise, and the group goes on with the next one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from instep.errors import TransportError
from instep.transport.group import Group

BEGUN, DECIDED, REFUSED = "begun", "decided", "refused"
"""Keys in the store, each with the number of a broadcast: its sender has asked; what became of it;
why a rank will not come."""
GRACE = 5.0
"""Seconds that a rank may take to come after a call to it has failed: the caller may try again at
once."""
LINE = "line"
AGAIN = "the group is in order: mend the call, and send all weights again"


class Lines:
    """Rank 0's connections with every other rank. They carry nothing, and break when the other
    process ends."""

    def __init__(self, group: Group, host: str) -> None:
        self.found: dict[int, socket.socket] = {}
        self.listener = self.mine = None
        if group.rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.listener = socket.create_server((host, 0), family=family, backlog=1024)
            self.listener.setblocking(False)
            group.store.set(LINE, str(self.listener.getsockname()[1]))
        else:
            port = int(group.store.get(LINE))
            with suppress(OSError):  # a network that does not allow it: deadlines hold there
                self.mine = socket.create_connection((host, port), timeout=5)
                self.mine.sendall(group.rank.to_bytes(4, "big"))
                self.mine.setblocking(False)

    def gone(self) -> list[int]:
        """The ranks whose processes have ended, or that have left. Rank 0 knows of all, the others
        of rank 0."""
        if self.mine is not None:
            return [0] if _hung_up(self.mine) else []
        with suppress(OSError):
            while self.listener is not None:
                line, _ = self.listener.accept()
                line.settimeout(1)
                self.found[int.from_bytes(line.recv(4), "big")] = line
                line.setblocking(False)
        return [rank for rank, line in self.found.items() if _hung_up(line)]

    def close(self) -> None:
        for one in (self.listener, self.mine, *self.found.values()):
            if one is not None:
                one.close()


class Meeting:
    """One per rank. `number` counts the broadcasts that were decided on, with this rank or without
    it."""

    def __init__(self, group: Group, lines: Lines | None) -> None:
        self.group, self.lines, self.number = group, lines, 0

    def ask(self, header: str, timeout: float) -> None:
        """The sender's part: returns when all ranks have come. header: what they are told.

        Raises `TransportError` where one does not come in time, or a call to one has failed: the
        broadcast is called off.
        """
        self.missed()
        number = self.number = self.number + 1
        self.group.store.set(BEGUN, str(number))
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        missing = list(others)

        def come() -> bool:
            missing[:] = [rank for rank in missing if self._number(f"came {rank}") < number]
            return not missing or self._refused() is not None

        self._wait(come, timeout)
        if not missing:
            self.group.store.set(DECIDED, f"{number} go {header}")
            return
        reason = self._refused() or f"rank {missing[0]} was not called within {timeout:g} s"
        self.group.store.set(DECIDED, f"{number} off {reason}")
        raise TransportError(f"nothing was sent: {reason}", next_step=AGAIN)

    def come(self, sender: int, timeout: float) -> str:
        """Every other rank's part: the header, when all have come.

        Raises `TransportError` where the broadcast is called off, or the sender does not ask in
        time.
        """
        self.missed()
        number = self.number + 1
        mine = f"came {self.group.rank}"
        self.group.store.set(mine, str(number))
        if not self._wait(lambda: self._number(DECIDED) >= number, timeout):
            self.group.store.set(mine, "0")
            raise TransportError(f"rank {sender} did not broadcast within {timeout:g} s", next_step=AGAIN)
        decided, what, header = self.group.store.get(DECIDED).decode().split(" ", 2)
        self.number = number
        if what == "off" or int(decided) != number:
            raise TransportError(f"rank {sender} called its broadcast off: {header}", next_step=AGAIN)
        return str(header)

    def call_off(self, reason: str) -> None:
        """Ends the wait of the broadcast that has been begun, unless all have come. May be called
        from another thread."""
        with suppress(Exception):  # the store ends with its group
            self.group.store.set(REFUSED, f"{self._number(BEGUN)} {reason}")

    def refuse(self, reason: str) -> None:
        """A call to this rank has failed on its way. A broadcast that waits for this rank now, or
        in a moment, is called off in a while."""
        threading.Thread(target=self._refuse, args=[reason], daemon=True).start()

    def _refuse(self, reason: str) -> None:
        number = self.number
        time.sleep(GRACE)
        with suppress(Exception):
            waits = max(number, self._number(DECIDED)) < self._number(BEGUN)
            if waits and number == self.number and self._number(BEGUN) != self._number(f"came {self.group.rank}"):
                self.call_off(reason)

    def missed(self) -> bool:
        """Whether broadcasts were decided on without this rank, which is to say: called off."""
        before, self.number = self.number, max(self.number, self._number(DECIDED))
        return self.number > before

    def _refused(self) -> str | None:
        if self._number(REFUSED) != self.number:
            return None
        reason: str = self.group.store.get(REFUSED).decode().split(" ", 1)[1]
        return reason

    def _number(self, key: str) -> int:
        store: Any = self.group.store
        return int(store.get(key).split(b" ", 1)[0]) if store.check([key]) else 0

    def _wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """Whether it is done within `timeout`. Raises where the group has ended, or a rank is
        gone."""
        self.group.begin(timeout)
        for turn in range(1 << 62):
            self.group.look()
            if done():
                return True
            if gone := self.lines.gone() if self.lines else []:
                raise self.group.end("a peer failed", TransportError(f"the process of rank {gone[0]} has ended, or has left the group"))
            if self.group.over():
                return False
            time.sleep(0 if turn < 50 else 0.0005)
        return False


def _hung_up(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
