"""Keeps one program within its limits, in a fork of the keeper, which imports this module
(standard library only)."""

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.generation.sandbox import kernel, walls
else:
    import kernel
    import walls

ENVIRONMENT = {
    "USER": "sandbox", "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip
CHANNEL = 3
"""The number under which a program finds its channel."""
QUIET = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in (0, 1, 2)]
POLLED = 0.05
"""Seconds between two looks at what a program has written, where no file system of its own bounds
that."""


class Warden:
    """Runs one program. Its socket brings the job and takes the report: a line of JSON, then what
    the program printed."""

    def __init__(self, setup: dict[str, Any], number: int, asker: int, channel: int | None = None) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.setup = setup
        self.full = setup["level"] == "full"
        self.number = number
        self.asker = asker
        self.channel = channel
        self.job = json.loads(self._line())
        self.output = b""
        self.folder = walls.PRIVATE if self.full else tempfile.mkdtemp(prefix="instep-sandbox-", dir=setup["temporary"])

    def _line(self) -> bytes:
        """Reads the first line without a buffer: `poll` must see what comes after it."""
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            part = os.read(self.asker, 1 << 20)
            if not part:
                raise SystemExit("no job")
            parts.append(part)
        return b"".join(parts)

    def keep(self) -> None:
        started = time.monotonic()
        try:
            self._enter()
            printed, printing = os.pipe()
            said, saying = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(said)
                os.close(printed)
                self._become(printing, saying)
            for descriptor in (printing, saying, *([] if self.channel is None else [self.channel])):
                os.close(descriptor)
            end = self._watch(child, printed, started + self.job["seconds"])
            self._kill(child)
            status = os.waitpid(child, 0)[1]  # in namespaces, when all processes in them are gone
            report = self._report(end, status, said)
            self._take(printed)
        except OSError as error:
            report = {"end": "lost", "code": -1, "why": str(error)}
        if not self.full:
            self._clean()
        over = len(self.output) > self.job["output"]
        if over and report["end"] in ("exit", "signal"):
            report["end"] = "output"
        report["seconds"] = time.monotonic() - started
        data = json.dumps(report).encode() + b"\n" + self.output[: self.job["output"]]
        while data:
            data = data[os.write(self.asker, data) :]

    def _kill(self, child: int) -> None:
        """Kills the program, which has not been waited for, so that its process id is still its
        own. Without namespaces, kills its process group too."""
        os.kill(child, signal.SIGKILL)
        if not self.full:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)

    def _enter(self) -> None:
        """Moves this process into the program's namespaces and user, all but the PID namespace."""
        if self.full:
            if self.setup["users"]:
                walls.become_user(self.number)
            walls.enter_namespaces(self.job["network"], self.setup["users"])
        elif self.setup["level"] == "partial" and self.setup["users"]:
            os.chown(self.folder, os.getuid() or walls.user_of(self.number), -1)
            walls.become_user(self.number)
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # for want of memory the kernel ends programs first
        except OSError:
            pass

    def _watch(self, child: int, printed: int, deadline: float) -> str:
        """Waits until the program has ended or must be ended, and returns which. Meanwhile reads
        its output, up to its limit."""
        os.set_blocking(printed, False)
        ended = os.pidfd_open(child)
        poll = select.poll()
        for descriptor in (self.asker, printed, ended):
            poll.register(descriptor, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if not self.full and self._size() > self.job["disk"]:
                return "disk"
            ready = {descriptor for descriptor, _ in poll.poll(1000 * (left if self.full else min(left, POLLED)))}
            if printed in ready and not self._take(printed):
                poll.unregister(printed)
            if len(self.output) > self.job["output"]:
                return "output"
            if ended in ready:
                return "exit"
            if self.asker in ready:
                return "timeout"
        return "timeout"

    def _take(self, printed: int) -> bool:
        """Reads the output that there is, up to one byte more than the limit. Returns False at
        its end."""
        while (room := self.job["output"] + 1 - len(self.output)) > 0:
            try:
                part = os.read(printed, min(room, 1 << 20))
            except BlockingIOError:
                return True
            if not part:
                return False
            self.output += part
        return True

    def _size(self) -> int:
        """Returns the bytes of all files in the program's folder."""
        found = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                try:
                    found += os.lstat(os.path.join(folder, name)).st_blocks * 512
                except OSError:
                    continue
        return found

    def _report(self, end: str, status: int, said: int) -> dict[str, Any]:
        os.set_blocking(said, False)
        try:
            words = os.read(said, 4096).decode(errors="replace")
        except BlockingIOError:
            words = ""
        if words.startswith("failed "):
            return {"end": "lost", "code": -1, "why": words}
        code = os.waitstatus_to_exitcode(int(words) if words else status)
        if end == "exit" and self.full and not words:
            return {"end": "lost", "code": code, "why": "something killed it from outside, for want of memory perhaps"}
        return {"end": "signal", "code": -code} if end == "exit" and code < 0 else {"end": end, "code": code}

    def _clean(self) -> None:
        for command in (["chmod", "-R", "u+rwx", self.folder], ["rm", "-rf", self.folder]):
            os.waitpid(os.posix_spawnp(command[0], command, ENVIRONMENT, file_actions=QUIET), 0)

    def _become(self, printing: int, saying: int) -> None:
        """Makes this process the program, or the first process of its namespace. Never returns."""
        try:
            walls.end_with_parent(saying)
            files = {"main.py": self.job["program"].encode(errors="replace"), "stdin": self.job["stdin"].encode(errors="replace")}
            if self.full:
                owner = None if self.setup["users"] else self.number
                walls.mount_private(self.job["disk"] + sum(map(len, files.values())), owner)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # after the user has changed: the program must not reach into this process
            for name, content in files.items():
                with open(os.path.join(self.folder, name), "wb") as file:
                    file.write(content)
            if self.full:
                kernel.drop_capabilities()
                self._stay_first(saying)
            self._start(printing, saying)
        except BaseException as error:
            os.write(saying, f"failed to start it: {type(error).__name__}: {error}"[:4000].encode(errors="replace"))
        os._exit(127)

    def _stay_first(self, saying: int) -> None:
        """Returns in a child, which becomes the program. The first process of a namespace
        ignores signals that it does not handle, so no program should be that one."""
        program = os.fork()
        if program == 0:
            return
        os.closerange(0, saying)
        os.closerange(saying + 1, walls.OPEN_FILES)
        os.chdir("/")
        status = os.waitpid(program, 0)[1]
        os.write(saying, str(status).encode())
        os._exit(0)

    def _start(self, printing: int, saying: int) -> None:
        os.setsid()
        nothing = os.open("/dev/null", os.O_WRONLY)
        os.dup2(os.open(os.path.join(self.folder, "stdin"), os.O_RDONLY), 0)
        os.dup2(nothing if self.job["prints"] == "nothing" else printing, 1)
        os.dup2(1 if self.job["prints"] == "all" else nothing, 2)
        if self.channel is not None:
            os.dup2(self.channel, CHANNEL)
        first = CHANNEL + (self.channel is not None)
        os.closerange(first, saying)
        os.closerange(saying + 1, 4096)  # that one closes when the program begins
        os.chdir(self.folder)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        level = self.setup["level"]
        alone = walls.FIRST_USER <= os.getuid() <= walls.NOBODY
        walls.limit(self.job, own=alone or (self.full and self.setup["users"]))
        if level == "partial":
            kernel.drop_capabilities()
            kernel.restrict_files([*walls.SYSTEM, *walls.settings(), *self.setup["folders"]], list(walls.DEVICES), self.folder)
        if level != "none":
            kernel.filter_calls(bytes.fromhex(self.setup["network" if self.job["network"] else "filter"]))
        environment = {**ENVIRONMENT, "HOME": self.folder, "TMPDIR": self.folder}
        os.execve(sys.executable, [sys.executable, "-I", "-u", "main.py"], environment)
