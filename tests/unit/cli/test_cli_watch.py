"""`instep watch` on a terminal, with its keys, and where there is none."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.loopback_server import MemoryServer
from helpers.toys import checkpoint

from instep import WeightSync
from instep.cli.server_status import Row, row
from instep.cli.watch import View

START = checkpoint(0, layers=1)
PROGRAM = [sys.executable, "-c", "from instep.cli import main; main()", "watch"]
PATIENCE = 60.0


@pytest.fixture(scope="module")
def servers() -> Iterator[list[MemoryServer]]:
    started = [MemoryServer(START), MemoryServer(START)]
    yield started
    for server in started:
        server.close()


class Terminal:
    """A command that runs on a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
        os.close(theirs)
        self.seen = ""

    def until(self, pattern: str) -> str:
        """What is shown from now on up to a match."""
        shown, deadline = "", time.monotonic() + PATIENCE
        while not re.search(pattern, shown, re.DOTALL):
            assert time.monotonic() < deadline, self.seen
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    text = os.read(self.ours, 65536).decode(errors="replace")
                except OSError:  # the other end was closed
                    break
                shown, self.seen = shown + text, self.seen + text
        assert re.search(pattern, shown, re.DOTALL), self.seen
        return shown

    def press(self, key: str) -> None:
        os.write(self.ours, key.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self.ours)


@pytest.fixture
def terminal(servers: list[MemoryServer]) -> Iterator[Terminal]:
    terminal = Terminal([*PROGRAM, *(server.url for server in servers)])
    yield terminal
    terminal.close()


def test_keys_sort_reverse_and_quit(terminal: Terminal, servers: list[MemoryServer]) -> None:
    terminal.until(r"serving.*sorted by engine, first to last")
    terminal.press("s")
    terminal.until("sorted by version, first to last")
    terminal.press("r")
    terminal.until("sorted by version, last to first")
    terminal.press("x")
    terminal.press("s")
    terminal.until("sorted by lag, first to last")
    with WeightSync(checkpoint(1, layers=1), [servers[0].url]) as sync:
        sync.push("while-watching")
    terminal.until("while-watching")
    terminal.press("q")
    assert terminal.process.wait(PATIENCE) == 0


def test_ctrl_c_ends_it_without_a_traceback(terminal: Terminal) -> None:
    terminal.until("sorted by engine")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(PATIENCE) == 0
    assert "Traceback" not in terminal.seen


def test_who_quits_waits_for_no_silent_server() -> None:
    program = "import instep.cli.server_status as asked; asked.DEADLINE = 3600; from instep.cli import main; main()"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        terminal = Terminal([sys.executable, "-c", program, "watch", f"http://127.0.0.1:{silent.getsockname()[1]}"])
        try:
            terminal.until("asking http")
            terminal.press("q")
            assert terminal.process.wait(PATIENCE) == 0
        finally:
            terminal.close()


def test_a_url_that_is_none_ends_it_in_words() -> None:
    terminal = Terminal([*PROGRAM, "gpu1"])
    try:
        terminal.until("ConfigError: an engine's URL is like")
        assert terminal.process.wait(PATIENCE) == 1
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()


def test_without_a_terminal_each_change_is_one_line_of_json(servers: list[MemoryServer]) -> None:
    process = subprocess.Popen(
        [*PROGRAM, servers[1].url, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        with WeightSync(checkpoint(2, layers=1), [servers[1].url]) as sync:
            sync.push("one")
        seen: list[Any] = []
        deadline = time.monotonic() + PATIENCE
        while not seen or seen[-1]["engines"][0]["version"] != "one":
            assert time.monotonic() < deadline
            seen.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait(10)
    assert first["engines"][0]["version"] is None
    assert len({json.dumps(rows) for rows in seen}) == len(seen)


ROWS = [Row("b", "serving", "v1", 2), Row("a", "unreachable"), Row("c", "serving", "v2", 0)]


@pytest.mark.parametrize(
    ("pressed", "order"), [("", "abc"), ("r", "cba"), ("s", "bca"), ("sr", "cba"), ("ss", "cba"), ("ssr", "bca"), ("ssssss", "abc")]
)
def test_rows_without_a_value_come_last(pressed: str, order: str) -> None:
    view = View()
    assert all(view.press(key) for key in pressed)
    assert "".join(row.engine for row in view.sorted(ROWS)) == order


@pytest.mark.parametrize("key", ["q", "\x03", "\x04"])
def test_these_keys_quit(key: str) -> None:
    assert not View().press(key)


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"state": "serving"}, "serving"),
        ({"state": "serving", "paused": True}, "paused"),
        ({"state": "serving", "refuses": "it catches up"}, "waiting"),
        ({"state": "dirty", "refuses": "a commit failed", "paused": True}, "dirty"),
    ],
)
def test_the_state_of_a_server(said: dict[str, Any], state: str) -> None:
    assert row("gpu1", {"versions": [""], **said}).state == state
