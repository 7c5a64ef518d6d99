"""SIGTERM and Ctrl-C while a server starts that catches KeyboardInterrupt itself, as vLLM does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from instep.cli import start_signals

pytest.importorskip("psutil", reason="psutil is not installed: it comes with vLLM")

SERVER = """
import os, signal, subprocess, sys, time
from contextlib import suppress
from instep.cli import start_signals

def interrupt(number, _):
    os.write(1, f"theirs {number}\\n".encode())  # `print` must not be called in the middle of a `print`
    raise KeyboardInterrupt

start_signals.PATIENCE = 1.0
with start_signals.ending_at_once():
    engine = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
    engine.stdout.readline()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    if sys.argv[2] == "serves":
        start_signals.started()
    while True:
        with suppress(KeyboardInterrupt):
            print(engine.pid, flush=True)
            time.sleep(60)
"""
WILLING = "import time; print(flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WILLING
SIGNALS = [signal.SIGTERM, signal.SIGINT]


def start(engine: str, state: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", SERVER, engine, state]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, int(server.stdout.readline())


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:  # one that nobody waits for any more
        return file.read().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("engine", [WILLING, STUBBORN], ids=["willing", "stubborn"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_server_that_starts_ends_by_the_signal_with_its_engine(number: signal.Signals, engine: str) -> None:
    server, pid = start(engine, "starts")
    server.send_signal(number)
    out, err = server.communicate(timeout=60)
    assert (server.returncode, out) == (-number, "")
    assert err == f"instep: {number.name} while vLLM starts: it ends\n"
    assert gone(pid)


def test_what_was_set_before_is_set_again() -> None:
    """asyncio has Ctrl-C cancel what it runs only where nobody else has set a handler."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with start_signals.ending_at_once():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_one_that_serves_is_left_to_its_own_handlers(number: signal.Signals) -> None:
    server, pid = start(WILLING, "serves")
    assert server.stdout is not None
    try:
        server.send_signal(number)
        assert server.stdout.readline() == f"theirs {int(number)}\n"
        time.sleep(0.1)
        assert server.poll() is None
        assert not gone(pid)
    finally:
        server.kill()
        os.kill(pid, signal.SIGKILL)
        server.communicate(timeout=60)
