"""`instep demo --ray` and its example, with two real vLLMs: a trainer learns from actors that take its weights in flight."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines import SETTINGS

import instep
from instep.demo.model import tiny

pytestmark = pytest.mark.program

pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
RUN = "from instep.cli import main; main()"
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, **SETTINGS, "PYTHONPATH": str(Path(instep.__file__).parents[1])}


def test_a_model_learns_from_actors_that_follow_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, "demo", "--ray", "--model", "tiny", "--json", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    log = json.loads(done.stdout)
    steps = log["steps"]
    assert log["engine"].startswith("2 actors on Ray")
    assert log["after"]["reward"] > log["before"]["reward"] + 0.1  # five times what chance moves it
    assert len({step["push"]["digest"] for step in steps}) == 12
    assert max(step["push"]["canary_gap"] for step in steps) < 1e-3
    assert {len(step["push"]["engines"]) for step in steps} == {2}
    for step in steps:  # never newer than what was pushed before it
        assert max(int(version.removeprefix("step-")) for version in step["sampled_from"]) < step["step"]
    assert [step["sampled_from"] for step in steps][-1] != ["step-0"]
    assert " lag " in done.stderr


def test_the_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "grpo_ray.py", tiny(tmp_path, 0), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d): reward 0\.\d\d", done.stdout, re.MULTILINE) == ["1", "2", "3"]
