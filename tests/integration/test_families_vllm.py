"""Families that differ in kind, on a real vLLM: after each of three pushes the engine is the one that loads the same weights from disk.

`make models` tries many more, in the same way.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from instep.bench.models.outcome import Matrix, Outcome

pytestmark = pytest.mark.program

DIFFER = {
    "qwen2": "biases, a tied head",
    "gpt2": "fused projections that are stored transposed",
    "gemma3-text": "norms that add one, two kinds of attention",
    "phi": "a head with a bias, layers that transformers computes",
    "qwen3-moe": "experts that the engine fuses",
    "gpt-oss": "experts that are stored fused, with biases and sinks",
    "deepseek-v2": "attention over a compressed cache, whose matrices are absorbed",
    "glm4-moe": "a router with a bias that no gradient reaches",
    "mamba2": "state spaces alone",
    "falcon-h1": "state spaces beside attention, short convolutions",
    "qwen3.5-text": "linear attention",
    "qwen2.5-vl": "a tower that sees",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    out = tmp_path_factory.mktemp("families")
    program = [sys.executable, "-m", "instep.bench.models", "--out", str(out), "--deadline", "100"]
    subprocess.run([*program, "--families", ",".join(DIFFER)], timeout=560, check=False, env=os.environ)
    found = msgspec.json.decode((out / "models-cpu.json").read_bytes(), type=Matrix)
    return {one.family: one for one in found.outcomes}


@pytest.mark.parametrize("family", DIFFER)
def test_an_engine_that_took_three_pushes_is_one_that_loaded_from_disk(family: str, outcomes: dict[str, Outcome]) -> None:
    found = outcomes[family]
    assert (found.verdict, found.why) == ("bit-equal", "")
    assert len(found.pushes) == 3
    assert found.live > 0
