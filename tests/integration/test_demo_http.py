"""`instep demo --http`: the same loop against a server in another process, with a real vLLM in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import SETTINGS

import instep

pytestmark = pytest.mark.program

RUN = "from instep.cli import main; main()"


def test_a_model_learns_while_a_server_follows_it(tmp_path: Path) -> None:
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(Path(instep.__file__).parents[1])}
    command = [sys.executable, "-c", RUN, "demo", "--http", "--model", "tiny", "--json", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=environment)
    assert done.returncode == 0, done.stderr
    log = json.loads(done.stdout)
    steps = log["steps"]
    assert log["engine"].startswith("vLLM behind http://127.0.0.1:")
    assert log["after"]["reward"] > log["before"]["reward"] + 0.1
    assert [step["sampled_from"] for step in steps] == [["default"], *([f"step-{number}"] for number in range(1, 12))]
    assert len({step["push"]["digest"] for step in steps}) == 12
    assert max(step["push"]["canary_gap"] for step in steps) < 1e-3
