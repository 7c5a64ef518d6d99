"""Ends the wait of a trainer in a broadcast that an engine was never asked to take part in.

A call may fail on its way to the workers: vLLM cannot send an argument, the method has another name, the actor has died. Only its caller
hears of that, and the trainer waits in the broadcast. A worker that has nothing else to do meanwhile ends that wait.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from instep.dropin.communicator import Communicator

LOOK = 0.5  # seconds
SHORTEST = 10.0
AT_WORK = "instep_at_work"


def patience(timeout: float) -> float:
    """Seconds that an idle worker waits for its call: a tenth of the deadline, as a rule."""
    return min(timeout, max(SHORTEST, timeout / 10))


def at_work(worker: Any, *, until: float = math.inf) -> None:
    """The worker does something, `until` a time of `time.monotonic`."""
    vars(worker)[AT_WORK] = until


def watch(worker: Any, group: Communicator, seconds: float) -> None:
    """Until the group ends. seconds: how long the worker may be idle while the trainer waits."""
    threading.Thread(target=_watch, args=(worker, group, seconds), daemon=True).start()


def _watch(worker: Any, group: Communicator, seconds: float) -> None:
    since = None
    with suppress(Exception), _line(group) as line:  # the store ends with the trainer
        while group.group.broken is None and not _hung_up(line):
            since = (since or time.monotonic()) if group.missed() else None
            if since is not None and time.monotonic() - max(since, vars(worker).get(AT_WORK, 0.0)) > seconds:
                group.give_up(
                    f"worker {worker.rank} of the engine was not called for {seconds:g} s while this broadcast waited, and had "
                    "nothing else to do: the call failed on its way, or was not made. Look at what collective_rpc, or ray.get, raised"
                )
            time.sleep(LOOK)


def _line(group: Communicator) -> socket.socket:
    """A connection that says nothing. It breaks when the trainer ends, which a store tells with a page of its stack."""
    store: Any = group.group.store.underlying_store
    line = socket.create_connection((store.host, store.port), timeout=5)
    line.setblocking(False)
    return line


def _hung_up(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except BlockingIOError:
        return False
