"""A worker in another process, over each transport that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.far_engine import FarEngine
from helpers.toys import checkpoint

from instep import WeightSync
from instep.errors import InstepError


@pytest.fixture
def engine() -> Iterator[FarEngine]:
    engine = FarEngine(checkpoint(0), "cpu")
    yield engine
    engine.stop()


@pytest.mark.parametrize("transport", ["shm", "gloo", "http"])
def test_a_worker_in_another_process_follows(engine: FarEngine, transport: Any) -> None:
    weights = dict(checkpoint(1))
    with WeightSync(weights, [engine], transport=transport, timeout=30) as sync:
        for version in "abc":
            for tensor in weights.values():
                tensor.neg_()
            sync.push(version)
            assert engine.holds(weights)
        assert not engine.holds({name: torch.zeros_like(tensor) for name, tensor in weights.items()})


def test_a_worker_that_is_killed_ends_the_push(engine: FarEngine) -> None:
    with WeightSync(checkpoint(1), [engine], transport="gloo", timeout=10) as sync:
        sync.push("one")
        engine.process.kill()
        engine.process.join(10)
        with pytest.raises(InstepError):
            sync.push("two")
        engine.pipe.close()
