"""Runs programs through the keeper of this process, at the strongest sandbox level that the machine
gives."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from instep.errors import ConfigError, MissingExtra
from instep.generation.sandbox.calls import compiled
from instep.generation.sandbox.programs import GRACE, LEVELS, REPORT, Level, Prints, Run, SandboxLimits, job, lost, report, trial

KEEPER = Path(__file__).with_name("keeper.py")
PARTS = ("bin", "include", "lib", "lib64", "pyvenv.cfg", "share", "ssl")
"""What of an interpreter's folder programs see. It may hold a project too, or a pip.conf with a
password."""
START = 20.0
"""Seconds for a keeper to come up."""


class Keeper:
    """A process that starts programs at one level. Raises `OSError` if this machine does not
    give that level, and `MissingExtra`."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.owner = os.getpid()
        setup: dict[str, str | list[str]] = {"level": level, "folders": folders(), "temporary": tempfile.gettempdir()}
        if level != "none":
            setup |= {"filter": _filter(level, network=False), "network": _filter(level, network=True)}
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                command(),
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={}, cwd="/", start_new_session=True,
            )  # fmt: skip
        atexit.register(self.close)
        try:
            self._set_up(setup)
        except BaseException:
            self.close()
            raise

    def _set_up(self, setup: dict[str, str | list[str]]) -> None:
        self.control.settimeout(START)
        try:
            self.control.send(json.dumps(setup).encode())
            answer = self.control.recv(1 << 16)
        except ConnectionError:
            answer = b""
        if not answer:
            raise OSError("its keeper did not come up")
        if refused := json.loads(answer).get("refused"):
            raise OSError(refused)

    def alive(self) -> bool:
        """Whether the keeper runs, and was started by this process rather than by its parent
        before a fork."""
        return self.owner == os.getpid() and self.process.poll() is None

    def start(self, channel: socket.socket | None) -> socket.socket:
        """Starts a warden and returns the socket over which it takes its job."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [b"1"], [theirs.fileno()] + ([channel.fileno()] if channel else []))
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """Ends the keeper. Each warden ends with the process that asked for it."""
        atexit.unregister(self.close)
        if self.owner == os.getpid():
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)  # closing is not enough where a forked child has it too
            self.process.wait(START)
        self.control.close()


_lock = threading.Lock()
_kept: Keeper | None = None
_reasons: dict[Level, str] = {}


def level() -> Level:
    """Returns the strongest level that this machine gives. The first call tries it with a
    program."""
    return _keeper().level


def reasons() -> dict[Level, str]:
    """Returns, for each level above `level()`, why this machine does not give it."""
    level()
    return dict(_reasons)


def require(least: Level) -> None:
    """Raises `ConfigError` if this machine gives a weaker level than `least`."""
    if LEVELS.index(_keeper().level) <= LEVELS.index(least):
        return
    why = "; ".join(f"{level}: {reason}" for level, reason in _reasons.items())
    raise ConfigError(
        f"no program was run: this machine gives the sandbox {_keeper().level!r}, and {least!r} is the least that is accepted ({why})",
        next_step=advice(_keeper().level),
    )


def advice(given: Level) -> str:
    """Returns what to do on a machine that gives no more than this level."""
    if any("libseccomp" in reason for reason in _reasons.values()):
        return "install the library libseccomp: `apt-get install libseccomp2`, or `dnf install libseccomp`"
    return (
        "let this process make user namespaces (on a host: sysctl user.max_user_namespaces, "
        "kernel.apparmor_restrict_unprivileged_userns=0; "
        "in a container: --security-opt seccomp=unconfined or --cap-add SYS_ADMIN), or accept less with "
        f'SandboxLimits(sandbox="{given}"): docs/generation.md has what that does not protect from'
    )


async def run_python(
    program: str, limits: SandboxLimits, stdin: str = "", *, prints: Prints = "all", channel: socket.socket | None = None
) -> Run:
    """Runs a program with this interpreter and its packages, in an environment of its own.
    Cancelling kills the program.

    channel: a socket that the program gets as descriptor 3; it is closed here. Raises `ConfigError`
    where this machine gives a weaker sandbox than `limits.sandbox`, and `MissingExtra`.
    """
    keeper = await kept(limits.sandbox)
    said = b""
    try:
        asker = keeper.start(channel)
    except OSError as error:
        return lost(f"its keeper is gone: {error}")
    finally:
        if channel:
            channel.close()
    reader, writer = await asyncio.open_unix_connection(sock=asker)
    try:
        async with asyncio.timeout(limits.seconds + GRACE):
            writer.write(job(program, limits, stdin, prints))
            await writer.drain()
            while len(said) <= limits.output + REPORT and (part := await reader.read(1 << 16)):
                said += part
    except TimeoutError:
        return lost(f"nothing was heard of it in {limits.seconds + GRACE:g} seconds")
    except OSError as error:
        return lost(f"its warden is gone: {error}")
    finally:
        writer.close()  # which ends all of it
    return report(said)


async def kept(least: Level) -> Keeper:
    """Returns the keeper of this process, and starts one if there is none. Raises `ConfigError`
    if its level is weaker than `least`."""
    if _kept is None or not _kept.alive():
        await asyncio.to_thread(_keeper)
    require(least)
    return _keeper()


def _keeper() -> Keeper:
    global _kept
    with _lock:
        if _kept is not None and not _kept.alive():
            again, _kept = _kept.level, None
            _kept = Keeper(again)
        if _kept is None:
            _kept = _strongest()
        return _kept


def _strongest() -> Keeper:
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise ConfigError(f"the sandbox needs Linux on x86_64 or aarch64, not {platform.system()} on {platform.machine()}")
    _reasons.clear()
    for level in LEVELS:
        try:
            keeper = Keeper(level)
        except MissingExtra:
            raise
        except (OSError, RuntimeError) as error:
            _reasons[level] = str(error)
            continue
        if (problem := trial(keeper.start)) is None:
            return keeper
        _reasons[level] = problem
        keeper.close()
    raise ConfigError("no program can be run here: " + "; ".join(f"{level}: {reason}" for level, reason in _reasons.items()))


def _forget() -> None:
    """Makes a new lock in a forked child, which may have been forked while the old one was held.
    The child starts a keeper of its own."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def command() -> list[str]:
    """Returns the command that starts a keeper. It leaves out site packages, which makes the
    start faster."""
    return [sys.executable, "-I", "-S", str(KEEPER)]


def _filter(level: Level, network: bool) -> str:
    return compiled(network=network, own=level == "full").hex()


def folders() -> list[str]:
    """Returns the paths of this interpreter and its packages."""
    found: list[str] = []
    executable = Path(sys.executable)
    while executable.is_symlink():  # each of the links on the way to it is needed
        found.append(str(executable))
        executable = executable.parent / os.readlink(executable)
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, os.path.realpath(sys.base_prefix))
    outside = dict.fromkeys(prefix for prefix in prefixes if not f"{prefix}/".startswith("/usr/"))
    parts = [path for prefix in outside for part in PARTS if os.path.lexists(path := os.path.join(prefix, part))]
    return [*parts, *(link for link in found if not any(link.startswith(f"{part}/") for part in (*parts, "/usr")))]
