"""A real vLLM follows sharded trainers of two ranks: a diagonal of what `tests/sharded` plays with the engine in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dropins import two_ranks
from sharded_trainer import WAYS

FAMILY = "llama"


@pytest.fixture(scope="module")
def ranks(checkpoints: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of the trainer saw."""
    return two_ranks("sharded_trainer.py", tmp_path_factory.mktemp("sharded"), FAMILY, checkpoints(FAMILY, 1))


@pytest.mark.parametrize("way", range(len(WAYS)), ids=["-".join(map(str, way)) for way in WAYS])
def test_the_engine_serves_what_the_trainer_has(ranks: list[dict[str, Any]], reference: Callable[..., Any], way: int) -> None:
    assert ranks[0]["digests"] == ranks[1]["digests"]
    generated = [(tokens, logprobs) for tokens, logprobs in ranks[0]["generated"][way]]
    assert generated == reference(FAMILY, WAYS[way][2])
