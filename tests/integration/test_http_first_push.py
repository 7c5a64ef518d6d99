"""Server after server: its first push over HTTP, with rounding, and its first completion, on a machine that is busy.

A worker once died without a word there. `INSTEP_SERVER_STARTS=50` looks for it longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from http_server import TOKEN, Server
from models import save, tiny

from instep import WeightSync
from instep.engine.remote.http import HttpEngine

STARTS = int(os.environ.get("INSTEP_SERVER_STARTS", "3"))
BURN = "import torch\nx = torch.rand(512, 512)\nwhile True:\n    x = (x @ x).clamp(-1, 1)"


class Traced(Server):
    """Its processes write where they were when a signal ends them."""

    def settings(self) -> dict[str, str]:
        return {"PYTHONFAULTHANDLER": "1"}


@pytest.fixture(scope="module")
def busy() -> Iterator[None]:
    """Three processes that compute without an end."""
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(3)]
    yield
    for process in burning:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("qwen3", 1), tmp_path_factory.mktemp("model"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("start", range(STARTS))
def test_a_worker_survives_its_first_push_and_its_first_completion(start: int, folder: Path, tmp_path: Path) -> None:
    server = Traced(folder, tmp_path / "log")
    try:
        server.wait()
        with WeightSync(tiny("qwen3", 2 + start).to(torch.float32), [HttpEngine(server.url, TOKEN)], cast=True, timeout=120) as sync:
            sync.push("first")
        answers = [server.generate([1, 2, 3, 4 + turn]) for turn in range(8)]
        assert [answer["versions"] for answer in answers] == [["first"]] * 8
        assert server.process.poll() is None
    finally:
        server.stop()
        text = server.log.read_text(errors="replace")
    assert "Fatal Python error" not in text, text[-8000:]
