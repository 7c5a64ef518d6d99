"""An inference server in a process of its own whose engine is in memory: it starts in seconds, and can be killed.

python memory_server.py PORT [FAULT]    FAULT: a point and a kind of `MemoryEngine.inject`, as `commit:hang`
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parents[1]
TOKEN = "token-of-the-processes"


def main() -> None:
    import uvicorn

    from helpers.toys import attention
    from instep import MemoryEngine
    from instep.engine.remote.http_control import Control, Served
    from instep.engine.remote.http_token import token_of

    engine = MemoryEngine(attention(0), name=f"memory-{sys.argv[1]}")
    served = Served(engine, token_of())

    async def generate(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/inject":
            engine.inject(*scope["query_string"].decode().split(":"))
        if scope["path"] in ("/inject", "/faults"):  # asked in the middle of a commit, when no weights can be read
            found: Any = list(engine.faults)
        else:
            found = {"version": engine.version, "fingerprint": str(engine.fingerprint()), "paused": engine.paused}
        body = json.dumps(found).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    uvicorn.run(Control(generate, lambda _: served), host="127.0.0.1", port=int(sys.argv[1]), lifespan="off", log_level="warning")


class Process:
    """The same, seen from a test."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        with socket.create_server((host, 0)) as sock:
            self.port: int = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> Process:
        source = str(HERE.parent / "src")
        environment = {**os.environ, "INSTEP_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join([source, str(HERE)]), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, __file__, str(self.port)], env=environment)
        self.until(lambda: self.health() == 200, 60)
        return self

    def until(self, condition: Any, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def health(self) -> int:
        try:
            return httpx.get(self.url + "/health", timeout=5).status_code
        except httpx.TransportError:
            return 0

    def serves(self) -> dict[str, Any]:
        """Version, fingerprint of the weights, and whether it is paused. Raises where it refuses to generate."""
        found: dict[str, Any] = httpx.post(self.url + "/v1/completions", timeout=10).raise_for_status().json()
        return found

    def status(self) -> dict[str, Any]:
        answer = httpx.get(self.url + "/instep/v1/status", headers={"authorization": f"Bearer {TOKEN}"}, timeout=10)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def inject(self, point: str, kind: str) -> None:
        httpx.get(f"{self.url}/inject?{point}:{kind}", timeout=10).raise_for_status()

    def faults(self) -> list[str]:
        """The points at which faults are injected that were not met yet."""
        found: list[str] = httpx.get(f"{self.url}/faults", timeout=10).raise_for_status().json()
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


if __name__ == "__main__":
    main()
