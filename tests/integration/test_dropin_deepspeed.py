"""Open Instruct's broadcast from a real DeepSpeed trainer of two ranks, ZeRO 0, 2 and 3, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dropins import free_port
from engines import SETTINGS
from zero_trainer import WAYS

FAMILY = "llama"


@pytest.fixture(scope="module")
def ranks(checkpoints: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of the trainer saw."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'instep[deepspeed]'")
    here = Path(__file__).parent
    out = tmp_path_factory.mktemp("zero") / "results.json"
    path = ":".join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **SETTINGS, "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    arguments = [str(free_port()), FAMILY, str(checkpoints(FAMILY, 1))]
    logs = [out.with_suffix(f".log{rank}").open("w") for rank in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, str(here / "zero_trainer.py"), str(out), str(rank), *arguments],
            env=environment,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        codes = [process.wait(500) for process in started]
    finally:
        for process in started:
            process.kill()
        for log in logs:
            log.close()
    assert codes == [0, 0], "\n".join(Path(log.name).read_text()[-3000:] for log in logs)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", range(len(WAYS)), ids=[f"ZeRO {stage}, {'whole' if whole else 'one by one'}" for stage, whole, _ in WAYS])
def test_the_engine_serves_what_the_trainer_has(ranks: list[dict[str, Any]], reference: Callable[..., Any], way: int) -> None:
    generated = [(tokens, logprobs) for tokens, logprobs in ranks[0]["generated"][way]]
    assert generated == reference(FAMILY, WAYS[way][2])


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "one by one"])
def test_every_rank_hears_of_an_engine_that_fails(ranks: list[dict[str, Any]], way: int) -> None:
    """And the next broadcast, which both ranks made, worked."""
    assert "engine 1: out of memory" in ranks[0]["errors"][way]
    assert "SyncError: rank 0 of the trainer could not bring the weights" in ranks[1]["errors"][way]
