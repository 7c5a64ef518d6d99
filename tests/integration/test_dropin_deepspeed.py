"""Open Instruct's broadcast from a real DeepSpeed trainer of two ranks, ZeRO 0, 2 and 3, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dropins import two_ranks
from zero_trainer import WAYS

FAMILY = "llama"


@pytest.fixture(scope="module")
def ranks(checkpoints: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of the trainer saw."""
    return two_ranks("zero_trainer.py", tmp_path_factory.mktemp("zero"), FAMILY, checkpoints(FAMILY, 1))


@pytest.mark.parametrize("way", range(len(WAYS)), ids=[f"ZeRO {stage}, {'whole' if whole else 'one by one'}" for stage, whole, _ in WAYS])
def test_the_engine_serves_what_the_trainer_has(ranks: list[dict[str, Any]], reference: Callable[..., Any], way: int) -> None:
    generated = [(tokens, logprobs) for tokens, logprobs in ranks[0]["generated"][way]]
    assert generated == reference(FAMILY, WAYS[way][2])


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "one by one"])
def test_every_rank_hears_of_an_engine_that_fails(ranks: list[dict[str, Any]], way: int) -> None:
    """And the next broadcast, which both ranks made, worked."""
    assert "engine 1: out of memory" in ranks[0]["errors"][way]
    assert "SyncError: rank 0 of the trainer could not bring the weights" in ranks[1]["errors"][way]
