"""A real `instep serve` that is killed within a commit: it catches up from a directory before it says that it is ready. And one that
is told to end while it starts."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

from http_server import READY, TOKEN, Server
from models import save, tiny
from test_http_serve import become, serves

from instep import WeightSync
from instep.engine.remote.http import HttpEngine
from instep.errors import EngineLost
from instep.transport.shm import segment as shm


def test_a_server_that_is_killed_within_a_commit_and_restarted(tmp_path: Path) -> None:
    model: Any = tiny("qwen3", 2)
    folder = save(model, tmp_path / "step-2")
    server = Server(save(tiny("qwen3", 1), tmp_path / "model"), tmp_path / "log", instep_catch_up=folder)
    try:
        server.wait()
        serves(server, model, "step-2")
        become(model, 3)
        with WeightSync(model, [HttpEngine(server.url, TOKEN)], timeout=60) as sync:
            sync.push("step-3")
            serves(server, model, "step-3")
            server.inject("hang:commit", 30)
            become(model, 4)
            failures: list[Exception] = []

            def push() -> None:
                try:
                    sync.push("step-4")
                except Exception as error:
                    failures.append(error)

            thread = threading.Thread(target=push)
            thread.start()
            deadline = time.monotonic() + 60
            while server.fault.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.5)
            server.kill()
            thread.join(60)
            assert [type(failure) for failure in failures] == [EngineLost]
            assert [state.serving for state in sync.status()] == ["unknown"]

            server.start()
            server.wait()
            become(model, 2)
            serves(server, model, "step-2")
            become(model, 4)
            sync.push("step-5")
            serves(server, model, "step-5")
    finally:
        server.stop()
    shm.sweep()


def test_a_server_that_is_told_to_end_while_vllm_waits_for_its_engine_ends(tmp_path: Path) -> None:
    """vLLM loses the signal there."""
    server = Server(save(tiny("qwen3", 1), tmp_path / "model"), tmp_path / "log")
    try:
        deadline = time.monotonic() + READY
        while not any(name.startswith("VLLM::Engine") for name in map(title, server.processes())):
            assert server.process.poll() is None, server.log.read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        server.process.terminate()
        assert server.process.wait(60) == -signal.SIGTERM
        assert "SIGTERM while vLLM starts: it ends" in server.log.read_text()
        while server.processes():  # Python's own, which removes shared memory
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        server.stop()


def title(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text()
    except OSError:
        return ""
