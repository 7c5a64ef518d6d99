"""TRL's GRPO trainer with its own colocated vLLM: after `follow(trainer)` the engine computes what the trainer does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import SETTINGS
from http_server import TOKEN, Server
from trl_trainer import GENERATIONS, STEPS, checkpoint

SERVER = {"logprobs_mode": "processed_logprobs", "weight_transfer_config": '{"backend": "nccl"}', "served_model_name": "policy"}
NATS = 0.02
"""The engine computes in bfloat16, the trainer in float32."""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install 'instep[trl]'")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What a rank of `trl_trainer.py` saw of a kind of trainer."""

    @cache
    def run(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        checkpoint(folder / "model")
        if kind == "server":
            server = Development(folder / "model", folder / "log", load_format="auto", skip_tokenizer_init=False, **SERVER)
            try:
                program("trl_trainer.py", folder, server.wait().url)
            finally:
                server.stop()
        else:
            program("trl_trainer.py", folder, kind)
        return folder

    return lambda kind, rank=0: json.loads((run(kind) / f"seen-{rank}.json").read_text())


def program(name: str, folder: Path, *arguments: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if arguments == ("ranks",) else []
    command = [sys.executable, *launcher, str(Path(__file__).parent / name), str(folder), *arguments]
    environment = {**os.environ, **SETTINGS, "INSTEP_TOKEN": TOKEN}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]


class Development(Server):
    """With the routes at which TRL looks."""

    def settings(self) -> dict[str, str]:
        return {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.parametrize("kind", ["plain", "lora", "server"])
def test_the_engine_computes_what_the_trainer_does_after_every_step(seen: Callable[..., dict[str, Any]], kind: str) -> None:
    generations = seen(kind)["generations"][: STEPS * GENERATIONS]
    assert [one["step"] for one in generations] == [step for step in range(STEPS) for _ in range(GENERATIONS)]
    assert max(one["gap"] for one in generations) < NATS
    moved = [
        max(abs(new - old) for new, old in zip(one["fixed"], before["fixed"], strict=True))
        for before, one in zip(generations[::GENERATIONS], generations[GENERATIONS::GENERATIONS], strict=False)
    ]
    assert min(moved) > 5 * NATS, "weights of the step before would not be noticed"


@pytest.mark.parametrize("kind", ["plain", "server"])
def test_a_step_is_pushed_once(seen: Callable[..., dict[str, Any]], kind: str) -> None:
    assert seen(kind)["pushes"][:STEPS] == ["step-0", "step-1", "step-2"]
    assert seen(kind)["serves"] == "step-2"


def test_weights_in_float32_are_pushed_to_an_engine_in_bfloat16(seen: Callable[..., dict[str, Any]]) -> None:
    assert seen("plain")["dtype"] == "torch.bfloat16", "the gaps are that of a cast"


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_an_engine_of_its_own(seen: Callable[..., dict[str, Any]], rank: int) -> None:
    found = seen("ranks", rank)
    assert found["pushes"] == ["step-0", "step-1", "step-2"]
    *trained, first, second = found["generations"]
    assert len(trained) == STEPS * GENERATIONS
    assert max(one["gap"] for one in trained) < NATS
    assert max(first["gap"], second["gap"]) < NATS, "weights that FSDP2 has sharded"
    assert max(abs(new - old) for new, old in zip(second["fixed"], first["fixed"], strict=True)) > 5 * NATS


def test_weights_that_sleep_has_discarded_are_pushed_again(seen: Callable[..., dict[str, Any]]) -> None:
    assert seen("lora")["pushes"] == ["step-0", "step-0.2", "step-1", "step-1.2", "step-2", "step-2.2"]


def test_adapters_are_merged_without_a_change_of_the_trainers_weights(seen: Callable[..., dict[str, Any]]) -> None:
    frozen = seen("lora")["frozen"]
    assert len(frozen) > 10
    assert all(frozen.values())


def test_a_push_that_is_refused_ends_the_training_and_the_engine_serves_on(seen: Callable[..., dict[str, Any]]) -> None:
    refused = seen("plain")["refused"]
    kind, message = refused["error"]
    assert kind == "PlanError"
    assert "embed_tokens" in message
    assert refused["serves"] == "step-2"
    assert refused["same"]
    assert seen("plain")["pushes"][STEPS:] == ["step-0.3", "step-1.2", "step-2.2"], "the next training"


def test_an_asynchronous_trainer_pushes_after_each_of_its_steps(tmp_path: Path) -> None:
    program("trl_async.py", tmp_path)
    found = json.loads((tmp_path / "seen.json").read_text())
    assert found["same"] == [True] * 3
    assert found["served"] == [f"version-{number}" for number in found["told"]] == ["version-1", "version-2", "version-3"]
    assert found["model_version"] == 3
