"""A real `instep serve` in a process of its own, and what it generates."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines import ARGUMENTS, SETTINGS

import instep

TOKEN = "never-in-a-log-" + "7" * 17
PROGRAM = "from instep.cli import main; main()"
READY = 240.0
"""Seconds for a vLLM to start on a busy machine."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def flags(**arguments: Any) -> list[str]:
    """As vLLM's command line has them: `max_model_len=96` is `--max-model-len 96`. False leaves a flag out."""
    found = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is not False:
            found += [flag] if value is True else [flag, str(value)]
    return found


class Server:
    """log: where its output goes, of all its processes."""

    def __init__(self, model: Path, log: Path, *, token: str | None = TOKEN, host: str | None = "127.0.0.1", **arguments: Any) -> None:
        self.model, self.log, self.token = model, log, token
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.fault = log.with_suffix(".fault")
        given = {
            "load_format": "dummy",
            "worker_extension_cls": "told_by_file.ToldByFile",
            "enable_scale_out": True,
            **ARGUMENTS,
            "port": self.port,
            **({"host": host} if host else {}),
            **arguments,
        }
        self.command = self.program(str(model)) + flags(**given)
        self.start()

    def program(self, model: str) -> list[str]:
        return [sys.executable, "-c", PROGRAM, "serve", model]

    def settings(self) -> dict[str, str]:
        """More of its environment."""
        return {}

    def start(self) -> None:
        paths = [str(Path(instep.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **SETTINGS, "VLLM_LOGGING_LEVEL": "DEBUG", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"INSTEP_TEST_FAULT": str(self.fault), **self.settings()}
        environment.pop("INSTEP_TOKEN", None)
        if self.token:
            environment["INSTEP_TOKEN"] = self.token
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def inject(self, point: str, value: float) -> None:
        """What `faulty.FaultyExtension` takes, when its worker is next asked for something. The server needs `ToldByFile`."""
        self.fault.with_suffix(".new").write_text(json.dumps([point, value]))
        self.fault.with_suffix(".new").rename(self.fault)

    def wait(self, status: int = 200, path: str = "/health") -> Server:
        """Until it answers with this status."""
        deadline = time.monotonic() + READY
        while self.get(path)[0] != status:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.1)
        return self

    def get(self, path: str, *, seconds: float = 10.0, **headers: str) -> tuple[int, str]:
        """Status and text; status 0 where nobody answers."""
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=seconds) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def status(self) -> dict[str, Any]:
        code, text = self.get("/instep/v1/status", authorization=f"Bearer {self.token}")
        assert code == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def generate(self, prompt: list[int], max_tokens: int = 12, seconds: float = 120.0) -> dict[str, Any]:
        """Greedy: `token_ids`, `logprobs`, `versions`, and `told`, the first and last in the headers.

        Raises `HTTPError` where the server refuses.
        """
        sampling = {"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 0, "detokenize": False, "ignore_eos": True}
        body = json.dumps({"model": str(self.model), "token_ids": prompt, "sampling_params": sampling}).encode()
        call = urllib.request.Request(self.url + "/inference/v1/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(call, timeout=seconds) as answer:
            choice = json.loads(answer.read())["choices"][0]
            told = [answer.headers[f"x-instep-version-{which}"] for which in ("first", "last")]
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return {
            "prompt": prompt,
            "token_ids": choice["token_ids"],
            "logprobs": logprobs,
            "versions": [version for version, *_ in spans],
            "spans": spans,
            "told": told,
            "finish": choice["finish_reason"],
        }

    def processes(self) -> list[int]:
        """Of its session: the server and all that it started."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == self.process.pid:
                    found.append(int(folder.name))
            except (OSError, IndexError):
                continue
        return found

    def signal(self, number: signal.Signals) -> None:
        """To each of its processes."""
        for process in self.processes():
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(20)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self.signal(signal.SIGKILL)
