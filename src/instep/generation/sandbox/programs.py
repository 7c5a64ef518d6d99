"""Messages between a process and the warden of its program."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from instep.generation.sandbox.limits import SandboxLimits

End = Literal["exit", "signal", "timeout", "output", "disk", "lost"]
"""How a program ended: by itself, by a signal, or because it went over a limit. lost: it could not be run, `Run.output` says why."""
Prints = Literal["all", "stdout", "nothing"]
"""Which of what a program prints is its output."""

GRACE = 10.0
"""Seconds beyond a program's own that its warden may take to start it and to clean up."""
REPORT = 1 << 14
"""Bytes beyond the output that a warden may send."""


class Run(Struct, frozen=True, kw_only=True):
    """A program that has ended. `code` is its exit code or the number of the signal."""

    output: str
    end: End
    code: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.end == "exit" and self.code == 0


def job(program: str, limits: SandboxLimits, stdin: str = "", prints: Prints = "all") -> bytes:
    """Encodes the message that a warden is sent."""
    names = ("seconds", "memory", "output", "file", "disk", "network")
    wanted: dict[str, Any] = {name: getattr(limits, name) for name in names}
    return json.dumps({"program": program, "stdin": stdin, "prints": prints, **wanted}).encode() + b"\n"


def report(said: bytes) -> Run:
    """Decodes the message that a warden has sent."""
    head, _, output = said.partition(b"\n")
    try:
        found = json.loads(head)
        if found["end"] == "lost":
            return lost(found["why"])
        return Run(output=output.decode(errors="replace"), end=found["end"], code=found["code"], seconds=found["seconds"])
    except (ValueError, KeyError):
        return lost("its warden was killed, for want of memory perhaps")


def lost(why: str) -> Run:
    return Run(output=why, end="lost", code=-1, seconds=0.0)


def trial(start: Callable[[socket.socket | None], socket.socket]) -> str | None:
    """Runs a first program. Returns why it failed, or None. start: the keeper's method."""
    with start(None) as asker:
        asker.settimeout(2 * GRACE)
        asker.sendall(job("print(6 * 7)", SandboxLimits()))
        said = b""
        while part := asker.recv(1 << 16):
            said += part
    run = report(said)
    return None if run.ok and run.output == "42\n" else f"a first program ended with {run.end} {run.code}: {run.output.strip()[-300:]}"
