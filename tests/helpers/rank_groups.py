"""Groups of processes that are a trainer's ranks. They play what all selected tests ask of them: one group of each size, and another one
after each case that kills a rank."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
Seen = list[Any]
"""What each rank reports of one case, as a dictionary; None for one that did not live to tell."""


def played(size: int, case: str, *marks: Any) -> Any:
    """A parameter of a test that looks at one case."""
    return pytest.param(case, marks=[pytest.mark.ranks(size, case), *marks], id=f"{size}-{case}")


def possible(case: str) -> bool:
    return "zero" not in case or importlib.util.find_spec("deepspeed") is not None


def lives(asked: list[str]) -> list[list[str]]:
    """The cases of each group of one size: one that kills a rank is the last thing that a group plays."""
    cases = dict.fromkeys(asked)
    last = [case for case in cases if "dies" in case]
    first = [case for case in cases if case not in last]
    return [[*first, *last[:1]], *([case] for case in last[1:])]


class Ranks:
    """What the processes of each group wrote down. They play when this is made, group after group.

    groups: the cases by the size of the group. seconds: for all of them.
    """

    def __init__(self, folder: Path, groups: dict[int, list[str]], seconds: float) -> None:
        self.folder = folder
        ordered = [(size, cases) for size, asked in groups.items() for cases in lives(asked)]
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "helpers.rank_program", str(folder), json.dumps(ordered)]
        with (folder / "log").open("w") as log:
            program = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            program.wait(seconds)
        except subprocess.TimeoutExpired:
            pass  # the cases that were not played say so
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # its ranks too
            program.wait()

    def saw(self, size: int, case: str) -> Seen:
        found: Seen = []
        for rank in range(size):
            file, log = self.folder / f"results.{size}.{rank}", self.folder / f"log.{size}.{rank}"
            results = json.loads(file.read_text()) if file.exists() else {}
            dead = "dies" in case and rank == (0 if "leader" in case else size - 1)
            said = (log if log.exists() else self.folder / "log").read_text()[-3000:]
            assert case in results or dead, f"rank {rank} of {size} did not finish {case}:\n{said}"
            assert "traceback" not in results.get(case, {}), f"rank {rank} of {size}: {results[case]['traceback']}"
            found.append(results.get(case))
        return found
