"""The whole demo on the embedded engine, with a random model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import instep.demo
from instep.demo.show import Show
from instep.errors import ConfigError

WITHOUT_VLLM = """
import pathlib, sys
sys.modules["vllm"] = None
from instep.demo import run
sys.exit(run(model="tiny", out=pathlib.Path(sys.argv[1]), json=True))
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of a tiny model mostly wait for each other, and for a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("demo")
    return out, subprocess.run([sys.executable, "-c", WITHOUT_VLLM, str(out)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def log(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    out, result = finished
    assert result.returncode == 0, result.stderr
    log: dict[str, Any] = json.loads((out / "demo.json").read_text())
    return log


def test_the_model_learns_what_the_reward_asks(log: dict[str, Any]) -> None:
    assert log["before"]["reward"] < 0.4
    assert log["after"]["reward"] > 0.7
    assert log["steps"][-1]["reward"] > log["steps"][0]["reward"] + 0.2


def test_each_step_generates_with_the_weights_of_the_step_before(log: dict[str, Any]) -> None:
    steps = log["steps"]
    assert [step["push"]["version"] for step in steps] == [f"step-{n}" for n in range(1, 13)]
    assert [step["sampled_from"] for step in steps] == [["unlabelled"], *([f"step-{n}"] for n in range(1, 12))]


def test_every_push_brings_new_weights_which_the_engine_computes_with(log: dict[str, Any]) -> None:
    assert len({step["push"]["digest"] for step in log["steps"]}) == 12
    assert max(step["push"]["canary_gap"] for step in log["steps"]) < 1e-4


def test_the_result_alone_is_on_stdout_and_the_table_on_stderr(
    finished: tuple[Path, subprocess.CompletedProcess[str]], log: dict[str, Any]
) -> None:
    _, result = finished
    assert json.loads(result.stdout) == log
    rows = [line for line in result.stderr.splitlines() if line.split()[:1] and line.split()[0].startswith("step-")]
    assert len(rows) == 12
    assert "vLLM is not installed" in result.stderr
    assert "learned: reward" in result.stderr


def test_the_picture_is_a_png(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, _ = finished
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("one_thread")
def test_the_same_seed_gives_the_same_run_and_another_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from instep.demo.loop import learn

    monkeypatch.setitem(sys.modules, "vllm", None)

    def digests(seed: int) -> list[str]:
        run = learn("tiny", 2, seed, tmp_path, Show(Console(file=io.StringIO())))
        return [step.push["digest"] for step in run.steps]

    first = digests(seed=0)
    assert digests(seed=0) == first
    assert digests(seed=1) != first


def test_steps_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        instep.demo.run(model="tiny", steps=0, out=tmp_path)
