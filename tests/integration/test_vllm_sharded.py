"""A real vLLM follows sharded trainers of two ranks: a diagonal of what `tests/sharded` plays with the engine in memory."""

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
from sharded_trainer import WAYS

FAMILY = "llama"


@pytest.fixture(scope="module")
def ranks(checkpoints: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of the trainer saw."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'instep[deepspeed]'")
    here = Path(__file__).parent
    out = tmp_path_factory.mktemp("sharded") / "results"
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **SETTINGS, "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    arguments = [str(free_port()), FAMILY, str(checkpoints(FAMILY, 1))]
    logs = [out.with_suffix(f".log{rank}") for rank in range(2)]
    started = []
    for rank, log in enumerate(logs):
        program = [sys.executable, str(here / "sharded_trainer.py"), str(out), str(rank), *arguments]
        with log.open("w") as file:
            started.append(subprocess.Popen(program, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(500) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", range(len(WAYS)), ids=["-".join(map(str, way)) for way in WAYS])
def test_the_engine_serves_what_the_trainer_has(ranks: list[dict[str, Any]], reference: Callable[..., Any], way: int) -> None:
    assert ranks[0]["digests"] == ranks[1]["digests"]
    generated = [(tokens, logprobs) for tokens, logprobs in ranks[0]["generated"][way]]
    assert generated == reference(FAMILY, WAYS[way][2])
