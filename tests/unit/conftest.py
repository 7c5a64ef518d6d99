"""What tests of commands share: servers with engines in memory, a checkpoint, and a way to run a command in this process.

And what tests of vLLM's weight transfer share: its shapes in several versions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.loopback_server import NEXT, START, MemoryServer, saved
from helpers.toys import Checkpoint
from helpers.vllm_engine import VERSIONS
from helpers.vllm_stub import install

from instep import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INSTEP_TOKEN", "INSTEP_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start(no_token: None) -> Iterator[Callable[..., MemoryServer]]:
    started: list[MemoryServer] = []

    def begin(weights: Checkpoint = START, **arguments: Any) -> MemoryServer:
        started.append(MemoryServer(weights, **arguments))
        return started[-1]

    yield begin
    for server in started:
        server.close()


@pytest.fixture
def server(start: Callable[..., MemoryServer]) -> MemoryServer:
    return start()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(NEXT, tmp_path / "step-1")


@pytest.fixture
def run(no_token: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Exit code, stdout and stderr of a command, run in this process."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["instep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capfd.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return command


@pytest.fixture(params=VERSIONS, ids=lambda version: ".".join(map(str, version)))
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return install(monkeypatch, request.param)


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return install(monkeypatch, VERSIONS[-1])
