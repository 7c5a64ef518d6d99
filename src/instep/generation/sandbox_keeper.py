"""Keeps one program within its limits (see `sandbox.py`). Runs as a script in a process of its own; standard library only.

It reads a job from stdin, runs it, and reports to stderr. The program can start threads but no process, so that killing one process ends
all of it. A kernel filter sees to that: looking for children and killing them loses the race against a program that forks without end.
When the keeper's stdin closes, whoever asked is gone, and the program ends.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from typing import Any

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
CALL, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # where they are in what a filter is given
CLONE_THREAD = 0x10000
X32 = 0x40000000  # from here on are x86's calls with 32-bit pointers
# The number of an architecture, and of its calls. Both are little-endian.
CALLS = {
    "x86_64": (0xC000003E, {"clone": 56, "fork": 57, "vfork": 58, "kill": 62, "tkill": 200, "socket": 41}),
    "aarch64": (0xC00000B7, {"clone": 220, "kill": 129, "tkill": 130, "socket": 198}),
}
EVERYWHERE = {"pidfd_send_signal": 424, "io_uring_setup": 425, "clone3": 435}


def main() -> None:
    job = json.loads(_line())
    folder = tempfile.mkdtemp(prefix="instep-sandbox-")
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(job, folder)
    end = _watch(child, started + job["seconds"])
    os.kill(child, signal.SIGKILL)  # it has not been waited for, so the number is still its own
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.rmtree(folder, ignore_errors=True)
    if end == "exit" and code < 0:
        end, code = "signal", -code
    os.write(2, json.dumps({"end": end, "code": code, "seconds": time.monotonic() - started}).encode())


def _line() -> bytes:
    """The first line of stdin, read without a buffer: `select` must see what comes after it."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            raise SystemExit("no job")
        parts.append(part)
    return b"".join(parts)


def _watch(child: int, deadline: float) -> str:
    """Waits until the program has ended or has to, and says which."""
    ended = os.pidfd_open(child)
    ready = select.select([0, ended], [], [], max(0.0, deadline - time.monotonic()))[0]
    return "exit" if ended in ready else "timeout"


def _become(job: dict[str, Any], folder: str) -> None:
    """Turns this process into the program. Never returns."""
    try:
        keeper = os.getppid()
        os.setsid()
        for name, text in (("main.py", job["program"]), ("stdin", job["stdin"])):
            with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        os.dup2(os.open(os.path.join(folder, "stdin"), os.O_RDONLY), 0)
        os.dup2(1, 2)
        os.closerange(3, 256)
        os.chdir(folder)
        for kind, limit in ((resource.RLIMIT_AS, job["memory"]), (resource.RLIMIT_FSIZE, job["file"]), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(kind, (limit, limit))
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(127)
        _refuse(job["network"])
        os.execve(sys.executable, [sys.executable, "-I", "-u", "main.py"], {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder})
    except BaseException as error:
        os.write(1, f"the program could not be started: {error}\n".encode())
        os._exit(127)


def _refuse(network: bool) -> None:
    """From here on the kernel refuses new processes, signals to others and, without `network`, sockets."""
    architecture, calls = CALLS[platform.machine()]
    refused = {**calls, **EVERYWHERE}
    clone, clone3 = refused.pop("clone"), refused.pop("clone3")
    if network:
        del refused["socket"]
    steps = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, CALL)]
    steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    steps += [(EQUAL, 0, 1, clone3), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]  # libc then uses clone, whose flags can be seen
    for number in refused.values():
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    steps += [(EQUAL, 1, 0, clone), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 0, 1, CLONE_THREAD)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _prctl(option: int, *values: int) -> None:
    """Values are passed as machine words: the kernel insists that those which it does not use are 0."""
    words = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *words):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
