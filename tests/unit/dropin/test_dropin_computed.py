"""Rounds of a model whose loader computes weights on the way: no plan tells when such a layer has all that it needs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.call_by_call import Model
from helpers.toys import Checkpoint, ToyHost

from instep.dropin.rounds import Rounds
from instep.engine.vllm.peers import Peers
from instep.errors import PlanError
from instep.receiver.state import Receiver


def load(model: Any, name: str, tensor: torch.Tensor) -> None:
    """Of `a` both halves are computed, `b` is copied."""
    if name.startswith("a."):
        half = model.a.weight[:2] if name == "a.up" else model.a.weight[2:]
        half.copy_(tensor + 1)
    else:
        model.get_parameter(name).copy_(tensor)


def weights(value: float) -> Checkpoint:
    """Both halves of `a` have the same bytes, as tensors of zeros have."""
    return {"a.up": torch.full((2, 6), value), "a.down": torch.full((2, 6), value), "b.weight": torch.full((3,), value)}


@pytest.fixture
def rounds() -> Rounds:
    return Rounds(Receiver(ToyHost(Model(), load)), Peers(0, 1, None, 5), cast=False)


def send(rounds: Rounds, tensors: Checkpoint) -> None:
    for name, tensor in tensors.items():
        rounds.add(name, tensor.clone, last=None)


def serves(rounds: Rounds) -> set[float]:
    model: Any = rounds.receiver.host.model
    return {*(model.a.weight - 1).flatten().tolist(), *model.b.weight.tolist()}


def test_the_first_update_ends_with_the_next_and_later_ones_by_themselves(rounds: Rounds, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "instep"):
        send(rounds, weights(1.0))
    assert "this update ends when the next begins, or with finish_update(): the loader computes a" in caplog.text
    assert not rounds.receiver.version
    rounds.add("a.up", weights(2.0)["a.up"].clone, last=None)
    assert (rounds.receiver.version, serves(rounds)) == ("round-1", {1.0})
    send(rounds, {name: tensor for name, tensor in weights(2.0).items() if name != "a.up"})
    assert serves(rounds) == {2.0}
    send(rounds, dict(reversed(weights(3.0).items())))
    rounds.settle()
    assert serves(rounds) == {3.0}


@pytest.mark.parametrize("end", [Rounds.finish, Rounds.settle_alone], ids=["finish_update", "check_weights_changed"])
def test_the_first_update_ends_when_the_trainer_says_so(rounds: Rounds, end: Any) -> None:
    for value in (1.0, 2.0):
        send(rounds, weights(value))
        if value == 1.0:
            end(rounds)
        assert serves(rounds) == {value}


@pytest.mark.parametrize("gap", ["a.down", "b.weight"])
def test_an_update_with_a_gap_is_refused_once_one_of_all_weights_has_come(rounds: Rounds, gap: str) -> None:
    send(rounds, weights(1.0))
    rounds.finish()
    for ends in (False, True):
        send(rounds, {name: tensor for name, tensor in weights(2.0).items() if name != gap})
        if ends:
            with pytest.raises(PlanError, match=f"incomplete, {gap} did not come"):
                rounds.finish("two")
        else:
            rounds.settle()
            rounds.begin()
        assert serves(rounds) == {1.0}
    send(rounds, weights(3.0))
    assert serves(rounds) == {3.0}
