"""A real vLLM follows sharded trainers of two ranks: a diagonal of what `tests/sharded` plays with the engine in memory, and Open
Instruct's broadcast from DeepSpeed with ZeRO 0, 2 and 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zero_trainer
from dropins import two_ranks
from sharded_trainer import WAYS

FAMILY = "llama"
ZERO = zero_trainer.WAYS


@pytest.fixture(scope="module")
def ranks(checkpoints: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of the trainers saw: one engine for all of them."""
    return two_ranks("sharded_trainer.py", tmp_path_factory.mktemp("sharded"), FAMILY, checkpoints(FAMILY, 1))


def pairs(generated: list[Any]) -> list[tuple[Any, Any]]:
    return [(tokens, logprobs) for tokens, logprobs in generated]


@pytest.mark.parametrize("way", range(len(WAYS)), ids=["-".join(map(str, way)) for way in WAYS])
def test_the_engine_serves_what_the_trainer_has(ranks: list[dict[str, Any]], reference: Callable[..., Any], way: int) -> None:
    assert ranks[0]["pushes"]["digests"] == ranks[1]["pushes"]["digests"]
    assert pairs(ranks[0]["pushes"]["generated"][way]) == reference(FAMILY, WAYS[way][2])


@pytest.mark.parametrize("way", range(len(ZERO)), ids=[f"ZeRO {stage}, {'whole' if whole else 'one by one'}" for stage, whole, _ in ZERO])
def test_the_engine_serves_what_deepspeed_broadcast(ranks: list[dict[str, Any]], reference: Callable[..., Any], way: int) -> None:
    assert pairs(ranks[0]["broadcasts"]["generated"][way]) == reference(FAMILY, ZERO[way][2])


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "one by one"])
def test_every_rank_hears_of_an_engine_that_fails(ranks: list[dict[str, Any]], way: int) -> None:
    """And the next broadcast, which both ranks made, worked."""
    first, second = (one["broadcasts"]["errors"][way] for one in ranks)
    assert "engine 1: out of memory" in first
    assert "SyncError: rank 0 of the trainer could not bring the weights" in second
