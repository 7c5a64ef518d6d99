"""Engines in memory behind real servers on the loopback, in threads of this process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from safetensors.torch import save_file

from helpers.asgi import app
from helpers.toys import Checkpoint, checkpoint
from instep import MemoryEngine
from instep.engine.remote.http_control import Served

START, NEXT = checkpoint(0, layers=1), checkpoint(1, layers=1)


def saved(weights: Checkpoint, folder: Path) -> Path:
    """The folder, with a checkpoint in it."""
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return folder


class MemoryServer:
    """One engine and its server. `url` is where trainers reach it."""

    def __init__(self, checkpoint: Any, *, token: str | None = None, name: str = "memory", **arguments: Any) -> None:
        self.engine = MemoryEngine(checkpoint, name=name, **arguments)
        self.served = Served(self.engine, token)
        config = uvicorn.Config(app(self.served), host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.name, self.url = f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"

    def close(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(10)
