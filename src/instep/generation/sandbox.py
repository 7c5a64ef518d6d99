"""Runs Python programs that nobody has read: each in a process of its own, with limits, and nothing of it left when it is over.

It guards a training run against what models write by accident: endless loops, huge output, memory, forks, signals to the wrong process.
It is no wall against an attacker: programs can read and write this user's files. For that, run the whole actor in a container.
"""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import Struct

from instep.errors import ConfigError

End = Literal["exit", "signal", "timeout", "output", "lost"]
"""How a program ended: by itself, by a signal, or because it went over a limit. lost: its keeper was killed, for want of memory perhaps."""

KEEPER = Path(__file__).with_name("sandbox_keeper.py")
GRACE = 10.0
"""Seconds beyond a program's own that its keeper may take to start it and to clean up."""

_ENDING: set[asyncio.Future[None]] = set()
"""Keeps the tasks that wait for a keeper alive: the event loop does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a program in a sandbox may use.

    seconds: of wall-clock time. memory: bytes of address space; beyond it the program sees a `MemoryError`. output: bytes of stdout and
        stderr together. file: bytes of one file that it writes; its working directory is removed when it ends. network: whether it may
        open sockets.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    output: int = 1 << 16
    file: int = 1 << 26
    network: bool = False

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "output", "file"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)!r}")
        if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
            raise ConfigError(f"the sandbox needs Linux on x86_64 or aarch64, not {platform.system()} on {platform.machine()}")


class Run(Struct, frozen=True, kw_only=True):
    """A program that has ended. `code` is its exit code or the number of the signal."""

    output: str
    end: End
    code: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.end == "exit" and self.code == 0


async def run_python(program: str, limits: SandboxLimits, stdin: str = "") -> Run:
    """Runs a program with this interpreter and its packages, and an environment of its own. Cancelling kills it.

    Raises `OSError` where no process can be started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(KEEPER),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    assert process.stderr
    output = said = b""
    try:
        async with asyncio.timeout(limits.seconds + GRACE):
            job = {"program": program, "stdin": stdin, **{name: getattr(limits, name) for name in limits.__slots__}}
            process.stdin.write(json.dumps(job).encode() + b"\n")
            while part := await process.stdout.read(1 << 16):
                output += part[: limits.output + 1 - len(output)]
                if len(output) > limits.output:
                    process.stdin.close()
            said = await process.stderr.read()
    except TimeoutError:
        pass
    finally:
        # The keeper ends everything when its stdin closes, be it because this process died. It is not killed: it has to clean up.
        process.stdin.close()
        ending = asyncio.ensure_future(_drain(process))
        _ENDING.add(ending)
        ending.add_done_callback(_ENDING.discard)
    return _run(output[: limits.output].decode(errors="replace"), len(output) > limits.output, said)


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Reads what is still written: asyncio does not see a process end before its pipes do."""
    await process.communicate()


def _run(output: str, over: bool, said: bytes) -> Run:
    try:
        report = json.loads(said)
    except ValueError:
        return Run(output=output, end="lost", code=-1, seconds=0.0)
    return Run(output=output, end="output" if over else report["end"], code=report["code"], seconds=report["seconds"])
