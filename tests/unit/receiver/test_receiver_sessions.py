"""Two trainers and one worker: whoever has prepared a version keeps the worker until it commits, gives up, or its lease ends."""

from __future__ import annotations

import time

import pytest
import torch
from helpers.call_by_call import Trainer, refused, serves, weights
from helpers.toys import ToyHost

from instep.receiver import state


class Clock:
    """Stands in for the module `time` inside the receiver."""

    now = 1000.0
    perf_counter = staticmethod(time.perf_counter)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(state, "time", clock)
    return clock


@pytest.fixture
def other(trainer: Trainer, clock: Clock) -> Trainer:
    """The second trainer. The first has prepared version `mine` for a minute."""
    trainer.trace()
    assert trainer.prepare("mine", weights(1.0), lease=60.0).fault is None
    return Trainer(trainer.receiver, trainer.transport, session="other")


def test_the_second_is_refused(trainer: Trainer, other: Trainer, host: ToyHost) -> None:
    refused(other.prepare("theirs", weights(2.0)), "EngineBusy", "another trainer is pushing 'mine' to this engine")
    refused(other.commit("mine"), "VersionConflict", "not prepared")
    refused(other.ask("ready"), "VersionConflict", "nothing is prepared here")
    assert trainer.commit("mine").version == "mine"
    assert serves(host, 1.0)


def test_the_second_cannot_push_the_first_aside(trainer: Trainer, other: Trainer, host: ToyHost) -> None:
    """It may look, with the same tensors or with others, and it may give up: the first's preparation stays."""
    other.trace()
    other.trace({"a.weight": torch.zeros(4, 6)})
    other.ask("abort")
    assert trainer.who().prepared == "mine"
    assert trainer.commit("mine").fault is None
    assert serves(host, 1.0)


def test_the_second_takes_over_when_the_lease_has_ended(trainer: Trainer, other: Trainer, host: ToyHost, clock: Clock) -> None:
    clock.now += 59
    refused(other.prepare("theirs", weights(2.0)), "EngineBusy", "another trainer")
    clock.now += 2
    assert other.trace().fault is None
    assert other.prepare("theirs", weights(2.0)).fault is None
    refused(trainer.commit("mine"), "VersionConflict", "not prepared")
    assert other.commit("theirs").version == "theirs"
    assert serves(host, 2.0)


def test_the_second_may_push_after_the_first_has_committed(trainer: Trainer, other: Trainer, host: ToyHost) -> None:
    trainer.commit("mine")
    assert other.push("theirs", 2.0).version == "theirs"
    assert serves(host, 2.0)


@pytest.mark.parametrize("end", ["abort", "prepare again"])
def test_the_first_may_change_its_mind(trainer: Trainer, other: Trainer, host: ToyHost, end: str) -> None:
    if end == "abort":
        trainer.ask("abort")
        assert other.push("theirs", 2.0).version == "theirs"
    else:
        assert trainer.prepare("better", weights(3.0)).fault is None
        refused(trainer.commit("mine"), "VersionConflict", "not prepared")
        assert trainer.commit("better").version == "better"
        assert serves(host, 3.0)
