"""Starts programs and keeps them within their limits. Runs as a script in a process of its own:
standard library only.

A keeper lives as long as whoever started it, and starts each program from a fork of itself, its
*warden*, so that no program waits for an interpreter to come up for its keeper. No job passes
through the keeper: a warden reads it from a socket of its own. The environment of both is empty.
When a warden's socket closes, whoever asked is gone, and the program ends.
"""

import errno
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.generation.sandbox import kernel, walls
    from instep.generation.sandbox.warden import Warden
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import kernel
    import walls
    from warden import Warden

HIGH = 100
"""The lowest number for the keeper's own descriptors, which no program gets."""


def main() -> None:
    control = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, HIGH))
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # a pipe must not get the number of an input or output
    setup = json.loads(control.recv(1 << 20))
    os.umask(0o022)
    try:
        prepare(setup)
    except OSError as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    control.send(b"{}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for wardens
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    number = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return  # whoever started this is gone
        number += 1
        try:
            if os.fork() == 0:
                control.close()
                try:
                    Warden(setup, number, *descriptors).keep()
                finally:
                    os._exit(0)
        except OSError:  # there is no room for another process: the program is lost, others are not
            pass
        for descriptor in descriptors:
            os.close(descriptor)


def prepare(setup: dict[str, Any]) -> None:
    """Makes the preparations that all programs share. Raises `OSError` if the machine forbids
    this level."""
    if setup["level"] == "partial":
        try:
            kernel.landlock_version()
        except OSError as error:
            forbidden = error.errno in (errno.EPERM, errno.EACCES)
            words = "this container's filter of calls forbids Landlock" if forbidden else "the kernel has no Landlock, or it is off"
            raise OSError(f"{words} ({error})") from error
        setup["users"] = _in_child(_read_as_another)
    if setup["level"] != "full":
        return
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        setup["root"] = True
    except PermissionError:
        walls.become_user(0)
        user, group = os.getuid(), os.getgid()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        walls.map_user(user, group)
    walls.build_root(setup["folders"])
    setup["users"] = not setup.get("root") or _in_child(lambda: kernel.unshare(kernel.CLONE_NEWUSER))


def _read_as_another() -> None:
    """Raises `OSError` if only root can read this interpreter. Programs then stay root, without
    root's rights."""
    walls.become_user(0)
    os.stat(sys.executable)
    os.listdir(os.path.dirname(os.__file__))


def _in_child(action: Callable[[], object]) -> bool:
    """Whether this process could run `action`, tried in a forked child, so that nothing changes
    here."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
