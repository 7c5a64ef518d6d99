"""The demo's engine behind HTTP: an `instep serve` in a process of its own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from instep.demo.engine import Engines, OneEngine
from instep.demo.show import Show
from instep.demo.task import Task
from instep.engine.remote.http import HttpEngine
from instep.engine.transformers import Completion
from instep.errors import ConfigError

PROGRAM = "from instep.cli import main; main()"
PATIENCE = 600.0
"""Seconds for a server to start, and for an answer."""


@contextmanager
def start(checkpoint: Path, lesson: Task, seed: int, show: Show) -> Iterator[Engines]:
    """Starts the server, and ends it. Raises `ConfigError` if it does not start."""
    show.say("engine:  starting a server in another process, about a minute")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    token, url = secrets.token_hex(16), f"http://127.0.0.1:{port}"
    settings = {
        "host": "127.0.0.1", "port": port, "dtype": "float32", "max-model-len": 64, "max-num-seqs": lesson.batch * lesson.samples,
        "block-size": 32, "kv-cache-memory-bytes": 1 << 28,
    }  # fmt: skip
    flags = [*(f"--{name}={value}" for name, value in settings.items()), "--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out"]
    server = subprocess.Popen([sys.executable, "-c", PROGRAM, "serve", str(checkpoint), *flags], env={**os.environ, "INSTEP_TOKEN": token})
    client = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)

    def generate(prompts: Sequence[list[int]], samples: int, seed: int) -> list[list[Completion]]:
        def answers(index: int) -> list[Completion]:
            sampling = {
                "n": samples, "temperature": 1.0, "max_tokens": lesson.max_tokens, "stop_token_ids": lesson.stop_token_ids,
                "ignore_eos": True, "logprobs": 0, "detokenize": False, "seed": seed + index * samples,
            }  # fmt: skip
            body = {"model": str(checkpoint), "token_ids": prompts[index], "sampling_params": sampling}
            answer = client.post("/inference/v1/generate", json=body).raise_for_status()
            return [_completion(choice) for choice in answer.json()["choices"]]

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(answers, range(len(prompts))))

    try:
        _wait(server, client)
        yield OneEngine(f"vLLM behind {url}", [HttpEngine(url, token)], generate, lesson, seed)
    finally:
        _stop(server)


def _completion(choice: dict[str, Any]) -> Completion:
    versions = choice.get("weight_versions")
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Completion(choice["token_ids"], logprobs, versions[-1]["version"] if versions else None)


def _wait(server: subprocess.Popen[bytes], client: httpx.Client) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        if server.poll() is not None or time.monotonic() > deadline:
            raise ConfigError("the server did not start", next_step="read engine.log in the output directory")
        time.sleep(0.2)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
