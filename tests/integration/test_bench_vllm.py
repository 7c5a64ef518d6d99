"""`instep bench` on a CPU with a real vLLM: every way must end with the trainer's weights in the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import SETTINGS

from instep.bench.generation import PUSHED

pytestmark = pytest.mark.program

RUN = "from instep.cli import main; main()"
SHORT = """
import sys
from instep.bench import generation

generation.RUN, generation.EVERY = 3.0, 1.0
generation.main(sys.argv[1:])
"""
"""The benchmark of actors with runs of a few seconds: enough for a push within each."""


def test_every_way_brings_the_trainers_weights_into_vllm(tmp_path: Path) -> None:
    """The command, from its arguments to its exit code; the result alone is on stdout, whatever vLLM prints."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, "bench", "--shapes", "tiny", "--repeats", "1", "--out", tmp_path, "--json"],
        env={**os.environ, **SETTINGS, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    rows = {row["way"]: row for row in found["rows"]}
    assert set(rows) == {"instep shm", "instep gloo", "reload in memory", "save and reload", "gloo, tensor by tensor"}
    assert {way: row["error"] for way, row in rows.items() if row["error"]} == {}
    assert {row["engine"] for row in rows.values()} == {"CPU"}
    assert all(0 <= row["gap"] < 0.5 for row in rows.values())
    assert found["notes"] == []
    assert found["setting"]["versions"]["vllm"]
    assert json.loads((tmp_path / "cpu-tiny.json").read_text()) == found


def test_an_actors_tokens_a_second_are_measured_beside_the_bare_engines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHORT, "--shapes", "tiny", "--repeats", "1", "--out", tmp_path]
    done = subprocess.run(command, env={**os.environ, **SETTINGS, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "cpu-generation-tiny.json").read_text())
    runs = {run["way"]: run for run in found["runs"]}
    assert list(runs) == ["AsyncLLM", "actor", *PUSHED.values()]
    assert {run["tokens"] for run in runs.values()} == {found["requests"] * 4 * 64}
    assert all(runs[way]["pushes"] > 0 for way in PUSHED.values())
    assert "% of AsyncLLM" in done.stdout
