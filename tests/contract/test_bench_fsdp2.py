"""The benchmark's trainer of two ranks under FSDP2, on CPUs: what `instep bench --trainer fsdp2` does on two GPUs, but for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from instep import bench
from instep.bench.contenders import FROM_TWO_RANKS, instep_from_ranks
from instep.bench.fsdp2 import Fsdp2Trainer
from instep.bench.measure import Bench, Way
from instep.bench.subjects import MemorySubject
from instep.errors import ConfigError

pytestmark = pytest.mark.program


@pytest.fixture(scope="module")
def trainer() -> Iterator[Fsdp2Trainer]:
    trainer = Fsdp2Trainer("tiny", ("cpu", "cpu"))
    yield trainer
    trainer.close()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_push_from_both_ranks_brings_the_weights_into_the_engine(trainer: Fsdp2Trainer, transport: str) -> None:
    found = Bench(trainer, MemorySubject(trainer), 1)
    row = found.measure(Way(transport, partial(instep_from_ranks, transport), "none"))
    assert row.error is None
    assert row.gap == 0.0
    assert row.medians.keys() >= {"total", "pause", "apply"}


def test_gathered_tensors_are_those_that_the_engine_is_compared_with(trainer: Fsdp2Trainer) -> None:
    trainer.step()
    with trainer.peer.doing("gather"):
        whole = dict(trainer.whole())
    assert whole.keys() == trainer.tensors.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in trainer.tensors.items())


def test_what_fails_in_the_other_rank_is_told_here_and_the_next_call_is_in_step_again(trainer: Fsdp2Trainer) -> None:
    with pytest.raises(RuntimeError, match="rank 1 of the trainer, open: ConfigError: "), trainer.peer.doing("open", "pigeons"):
        pass
    trainer.step()


def test_without_two_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match="on two GPUs, this machine has 0"):
        bench.run("tiny", repeats=1, trainer="fsdp2")


def test_the_ways_are_named_once_and_have_a_rival_among_them() -> None:
    names = [way.name for way in FROM_TWO_RANKS]
    assert len(set(names)) == len(names)
    assert {way.rival for way in FROM_TWO_RANKS} <= {None, *names}
