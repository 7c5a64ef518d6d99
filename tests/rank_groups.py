"""Groups of processes that are a trainer's ranks. A group is started once, and plays what all selected tests ask of it."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
Seen = list[dict[str, Any]]
"""What each rank reports of one case; None for one that did not live to tell."""


def played(size: int, case: str) -> Any:
    """A parameter of a test that looks at one case."""
    return pytest.param(case, marks=pytest.mark.ranks(size, case), id=f"{size}-{case}")


def possible(case: str) -> bool:
    return "zero" not in case or importlib.util.find_spec("deepspeed") is not None


class Ranks:
    """The processes of one group, and what they wrote down."""

    def __init__(self, folder: Path, size: int, cases: list[str], seconds: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        cases = sorted(dict.fromkeys(cases), key=lambda case: "dies" in case)  # that one is the last thing that a group plays
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
        self.out, self.size = folder / "results", size
        self.logs = [folder / f"log.{rank}" for rank in range(size)]
        program = [sys.executable, str(TESTS / "rank_program.py"), str(self.out)]
        started = []
        for rank in range(size):
            with self.logs[rank].open("w") as log:
                command = [*program, str(rank), str(size), str(port), *cases]
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        end = time.monotonic() + seconds
        try:
            for process in started:
                process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # the cases that were not played say so
        finally:
            for process in started:
                process.kill()
                process.wait()

    def saw(self, case: str) -> Seen:
        found: Seen = []
        for rank in range(self.size):
            file = Path(f"{self.out}.{rank}")
            results = json.loads(file.read_text()) if file.exists() else {}
            dead = "dies" in case and rank == self.size - 1
            assert case in results or dead, f"rank {rank} did not finish {case}:\n{self.logs[rank].read_text()[-3000:]}"
            assert "traceback" not in results.get(case, {}), f"rank {rank}: {results[case]['traceback']}"
            found.append(results.get(case))
        return found
