"""`instep demo --model tiny`: a real vLLM follows a trainer that learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.program

RUN = "from instep.cli import main; main()"


def test_vllm_follows_a_model_that_learns(tmp_path: Path) -> None:
    """The command, from its arguments to its exit code; the result alone is on stdout, whatever vLLM prints."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, "demo", "--model", "tiny", "--json", "--out", tmp_path], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr
    log = json.loads(done.stdout)
    steps = log["steps"]
    assert log["engine"].startswith("vLLM")
    assert log["after"]["reward"] > log["before"]["reward"] + 0.2
    assert [step["sampled_from"] for step in steps[1:]] == [[f"step-{number}"] for number in range(1, 12)]
    assert len({step["push"]["digest"] for step in steps}) == 12
    assert max(step["push"]["canary_gap"] for step in steps) < 1e-3
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert "WARNING" not in done.stderr
