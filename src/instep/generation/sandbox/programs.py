"""Limits of a program in a sandbox, and the messages between a process and the warden of the
program."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from msgspec import Struct

from instep.errors import ConfigError

Level = Literal["full", "partial", "none"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""The strongest first."""
End = Literal["exit", "signal", "timeout", "output", "disk", "lost"]
"""How a program ended: by itself, by a signal, or because it went over a limit. lost: it could not
be run, `Run.output` says why."""
Prints = Literal["all", "stdout", "nothing"]
"""Which of what a program prints is its output."""

GRACE = 10.0
"""Seconds beyond a program's own that its warden may take to start it and to clean up."""
REPORT = 1 << 14
"""Bytes beyond the output that a warden may send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of a program in a sandbox. Raises `ConfigError` for values that make no sense.

    seconds: of wall-clock time. memory: bytes of address space; beyond it the program sees a
        `MemoryError`. output: bytes of stdout and stderr together. file: bytes of one file that it
        writes. disk: bytes of all its files, which are in memory and gone when it ends. network:
        whether it may connect to others over IP.
    sandbox: the weakest wall between program and machine that is accepted: `full` (namespaces of
        its own), `partial` (Landlock and a seccomp filter) or `none`. The strongest that the
        machine gives is taken, whatever is accepted.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    output: int = 1 << 16
    file: int = 1 << 26
    disk: int = 1 << 27
    network: bool = False
    sandbox: Level = "partial"

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "output", "file", "disk"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)!r}")
        if self.sandbox not in LEVELS:
            raise ConfigError(f"sandbox must be one of {', '.join(LEVELS)}, not {self.sandbox!r}")


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
