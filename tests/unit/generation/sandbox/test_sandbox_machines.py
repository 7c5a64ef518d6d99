"""What the sandbox is on machines that permit less than this one, as containers do, or run it as another user than root."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.rollouts import run
from helpers.sandbox_escapes import HEAD, REACHES_FILES, REACHES_NETWORK, REACHES_PROCESSES

from instep.cli.checks import sandbox as check
from instep.errors import ConfigError
from instep.generation.sandbox import SandboxLimits, kept, level, reasons, run_python

PYTHON = "/usr/bin/python3"
"""An interpreter that every user can read."""
USER = 12345
LIMITS = SandboxLimits(seconds=20.0, sandbox="none")
START = """
import errno, json, os, subprocess, sys
import pyseccomp
user, refused, hidden, command = json.loads(sys.argv[1])
calls = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
for name in refused:
    only = [pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0x10000000, 0x10000000)] if name == "user namespaces" else []
    number = 444 if name == "landlock" else pyseccomp.resolve_syscall(0, name.partition(" ")[0].replace("user", "unshare"))
    calls.add_rule(pyseccomp.ERRNO(errno.EPERM), number, *only)
if hidden:
    subprocess.run(["mount", "-t", "tmpfs", "none", "/proc/irq"], check=True)
if user:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
calls.load()
os.execve(command[0], command, {})
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, or give rights away")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that makes this machine another one: without these calls or capabilities, as this user."""

    def become(*, user: int = 0, refused: tuple[str, ...] = (), without: tuple[str, ...] = (), hidden: bool = False) -> None:
        keeper = kept.command()[1:]
        if subprocess.run([PYTHON, *keeper[:-1], "-c", f"open({keeper[-1]!r})"], user=USER, check=False, capture_output=True).returncode:
            pytest.skip(f"no {PYTHON}, or another user than root cannot read {keeper[-1]}")
        words = json.dumps([user, refused, hidden, [PYTHON, *keeper]])
        dropped = ["setpriv", "--bounding-set", ",".join(f"-{name}" for name in without)] if without else []
        own = ["unshare", "--mount"] if hidden else []
        monkeypatch.setattr(kept, "command", lambda: [*own, *dropped, sys.executable, "-c", START, words])
        monkeypatch.setattr(kept, "folders", list)
        monkeypatch.setattr(kept, "_kept", None)
        monkeypatch.setattr(kept, "_reasons", {})

    yield become
    if kept._kept:
        kept._kept.close()


def program(text: str, limits: SandboxLimits = LIMITS) -> str:
    ran = run(run_python(text, limits))
    assert ran.ok, ran.output
    return ran.output


def closes(*names: str) -> None:
    """These ways out are closed."""
    ways = {**REACHES_PROCESSES, **REACHES_FILES, **REACHES_NETWORK}
    decoy = subprocess.Popen(["sleep", "100"], user=os.geteuid())
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert kept._kept
        reached = {"actor": os.getpid(), "decoy": decoy.pid, "keeper": kept._kept.process.pid, "port": server.getsockname()[1]}
        for name in names:
            words = set(
                program(HEAD + ways[name].format(**reached, shared="/dev/shm/absent", home="/etc/shadow", abstract="a")).split("\n")
            )
            assert words == {"closed", ""}, name
    assert decoy.poll() is None
    decoy.kill()
    decoy.wait()


BOTH = (
    "kill",
    "sigqueue",
    "F_SETOWN",
    "prlimit",
    "ptrace",
    "/proc/PID/mem",
    "/proc/PID/environ",
    "pidfd_getfd",
    "sockets",
    "a setuid program",
)


def test_another_user_than_root_has_namespaces_too(machine: Any) -> None:
    machine(user=USER)
    assert (level(), reasons()) == ("full", {})
    assert program("import os; print(os.getuid(), os.listdir('/proc/1/..') != [])").split() == [str(USER), "True"]
    closes(*BOTH, "capabilities", "writable places", "mounts", "settings of the kernel")


def test_root_without_user_namespaces_has_all_others(machine: Any) -> None:
    machine(refused=("user namespaces",))
    assert level() == "full"
    closes(*BOTH, "capabilities", "writable places", "mounts", "settings of the kernel")


@pytest.mark.parametrize("user", [0, USER])
def test_a_kernel_that_makes_no_tree_read_only_at_once_has_namespaces_too(machine: Any, user: int) -> None:
    machine(user=user, refused=("mount_setattr",))
    assert level() == "full"
    closes(*BOTH, "capabilities", "writable places", "the interpreter")
    options = [
        line.split()[5].split(",") for line in program("print(open('/proc/self/mountinfo').read())").splitlines() if " /usr " in line
    ]
    assert options
    assert all({"ro", "nosuid", "nodev"} <= set(one) for one in options)


def test_a_container_that_hides_parts_of_proc_has_programs_without_any(machine: Any) -> None:
    machine(user=USER, hidden=True)
    assert level() == "full"
    assert program("import os; print(os.listdir('/proc'))") == "[]\n"
    closes(*BOTH)


def test_root_in_a_container_without_its_rights_has_landlock(machine: Any) -> None:
    machine(refused=("unshare",), without=("sys_admin",))
    assert (level(), list(reasons())) == ("partial", ["full"])
    assert "Operation not permitted" in reasons()["full"]
    assert int(program("import os; print(os.getuid())")) >= 61184
    closes(*BOTH, "writable places", "mounts", "settings of the kernel", "password hashes")


def test_a_user_in_a_container_has_landlock(machine: Any) -> None:
    machine(user=USER, refused=("unshare",))
    assert level() == "partial"
    closes(*BOTH, "writable places", "mounts", "settings of the kernel", "password hashes")
    finding = check()
    assert (finding.level, "partial" in finding.text) == ("warn", True)
    assert "Operation not permitted" in finding.text


def test_where_there_is_no_wall_no_program_runs_unless_that_is_asked_for(machine: Any) -> None:
    machine(user=USER, refused=("unshare", "landlock"))
    assert level() == "none"
    with pytest.raises(ConfigError, match="gives the sandbox 'none'") as refused:
        program("print(1)", SandboxLimits())
    assert "filter of calls forbids Landlock" in str(refused.value)
    assert 'SandboxLimits(sandbox="none")' in str(refused.value)
    assert program("print(1)") == "1\n"
    finding = check()
    assert finding.level == "warn"
    assert 'sandbox="none"' in str(finding.next_step)


@pytest.mark.parametrize("call", ["mount", "pivot_root"])
def test_user_namespaces_without_rights_in_them_are_no_wall(machine: Any, call: str) -> None:
    machine(user=USER, refused=(call,))
    assert level() == "partial"
    finding = check()
    assert (finding.level, f"{call}" in finding.text) == ("warn", True)
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in str(finding.next_step)


def test_doctor_says_what_this_machine_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = check()
    assert finding.text.startswith(level())
    monkeypatch.setattr(kept, "KEEPER", Path("absent.py"))
    monkeypatch.setattr(kept, "_kept", None)
    assert check().level == "warn"
