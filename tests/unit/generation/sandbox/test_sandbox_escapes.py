"""Ways out of the sandbox, tried by real programs at each level that this machine gives."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.rollouts import run
from helpers.sandbox_escapes import FULL, HEAD, OPEN_OTHERWISE
from helpers.sandbox_levels import at

from instep.generation.sandbox import Level, SandboxLimits, run_python

LIMITS = SandboxLimits(seconds=20.0, memory=1 << 30, file=1 << 20, disk=1 << 23, sandbox="none")
PARTIAL = {
    name: text
    for name, text in FULL.items()
    if name not in ("capabilities", "threads")  # it has none that Landlock lets it use, but keeps its user; memory bounds its threads
}


@pytest.fixture
def reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What programs try to reach, all of this user."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    decoy = subprocess.Popen(["sleep", "300"], start_new_session=True)
    shared = Path("/dev/shm", f"test-escapes-{os.getpid()}")
    shared.write_bytes(b"AAA")
    home = tmp_path / "secret"
    home.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named:
        named.bind(f"\0test-escapes-{os.getpid()}")
        named.setblocking(False)
        yield {
            "process": decoy, "actor": os.getpid(), "decoy": decoy.pid, "shared": shared, "home": home, "port": server.getsockname()[1],
            "abstract": f"test-escapes-{os.getpid()}", "file": LIMITS.file,
        }  # fmt: skip
        shared.unlink()
    decoy.kill()
    decoy.wait()


@pytest.mark.parametrize("name", FULL)
def test_a_way_out_of_namespaces_is_closed(name: str, reached: dict[str, Any]) -> None:
    with at("full") as keeper:
        closed(FULL[name], {**reached, "keeper": keeper.process.pid})


@pytest.mark.parametrize("name", PARTIAL)
def test_a_way_past_landlock_is_closed(name: str, reached: dict[str, Any]) -> None:
    with at("partial") as keeper:
        closed(PARTIAL[name], {**reached, "keeper": keeper.process.pid})


def closed(text: str, reached: dict[str, Any]) -> None:
    ran = run(run_python(HEAD + text.format(**reached), LIMITS))
    assert ran.ok, ran.output
    assert set(ran.output.splitlines()) == {"closed"}
    assert (reached["shared"].read_bytes(), reached["home"].read_text()) == (b"AAA", "secret")
    assert reached["process"].poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="some of these ways are open to root only")
@pytest.mark.parametrize("name", OPEN_OTHERWISE)
def test_the_same_program_gets_out_where_there_is_no_wall(name: str, reached: dict[str, Any]) -> None:
    with at("none") as keeper:
        ran = run(run_python(HEAD + FULL[name].format(**{**reached, "keeper": keeper.process.pid}), LIMITS))
    killed = reached["process"].poll() is not None
    assert killed or "open" in ran.output, ran.output


@pytest.mark.parametrize("level", ["full", "partial"])
def test_calls_in_another_convention_end_the_program(level: Level) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("only x86 has a second convention")
    with at(level):
        ran = run(run_python(HEAD + "syscall(0x40000000 | 57)", LIMITS))
    assert (ran.end, ran.code) == ("signal", signal.SIGSYS)
