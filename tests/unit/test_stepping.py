"""A trainer that goes on while a push is in progress cannot change what is pushed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.named_weights import WEIGHTS, Trainer, engine_named, serves
from torch import nn

from instep import MemoryEngine, WeightSync
from instep.errors import SourceError
from instep.source.module import MappingSource
from instep.telemetry import Event

pytestmark = pytest.mark.usefixtures("segments")

BIG = 1 << 20


def step(tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.mul_(-3)


@pytest.mark.usefixtures("deadlines")
@pytest.mark.parametrize("phase", ["canary", "prepare", "commit"])
def test_after_the_copy_the_trainer_is_free(phase: str) -> None:
    """What is published is a copy with digests of its own: steps afterwards reach neither the engines nor a late one."""
    engine, late = engine_named("engine"), engine_named("late")
    trainer = Trainer(engine, late, require="any")

    def sink(event: Event) -> None:
        if event.phase == phase:
            step(trainer.source)

    trainer.source.update({name: tensor.clone() for name, tensor in WEIGHTS["a"].items()})
    trainer.sync._session.sinks = (sink,)
    late.inject("prepare", "hang")
    assert [state.engine for state in trainer.sync.push("a").failed] == ["late"]
    assert serves(engine) == ("a", "a")
    trainer.sync._session.sinks = ()
    trainer.sync.catch_up()
    assert serves(late) == ("a", "a")


class Stepping(MappingSource):
    """A trainer that changes an earlier tensor while a later one is read."""

    steps = True

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(super().tensors()):
            if self.steps and index == 3:
                next(iter(self._mapping.values())).add_(1)
            yield name, tensor


def test_a_step_during_the_copy_is_found_out() -> None:
    engine = engine_named()
    source = Stepping({name: tensor.clone() for name, tensor in WEIGHTS["a"].items()})
    with WeightSync(source, [engine]) as sync:
        with pytest.raises(SourceError, match="changed its weights while they were copied; no engine was touched") as caught:
            sync.push("a")
        assert "between optimizer steps" in str(caught.value)
        assert "prepare" not in engine.calls
        assert serves(engine) == ("start", None)
        source.steps = False
        source._mapping = WEIGHTS["b"]
        sync.push("b")
    assert serves(engine) == ("b", "b")


def test_a_thread_that_steps_during_the_copy_is_found_out() -> None:
    trainer = nn.Linear(BIG, 1, bias=False)
    engine = MemoryEngine(trainer.state_dict())
    before = engine.fingerprint()
    started, stop = threading.Event(), threading.Event()

    def train() -> None:
        while not stop.is_set():
            with torch.no_grad():
                trainer.weight.add_(1)
            started.set()

    thread = threading.Thread(target=train)
    with WeightSync(trainer, [engine]) as sync:
        thread.start()
        try:
            started.wait()
            with pytest.raises(SourceError, match="changed its weights"):
                sync.push("a")
        finally:
            stop.set()
            thread.join()
        assert engine.fingerprint() == before
        sync.push("a")
    assert engine.fingerprint() == MemoryEngine(trainer.state_dict()).fingerprint()


def test_a_source_that_fails_touches_no_engine(segments: Path) -> None:
    class Broken(MappingSource):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield next(super().tensors())
            raise OSError("disk is gone")

    engine = engine_named()
    with WeightSync(Broken(WEIGHTS["a"]), [engine]) as sync:
        with pytest.raises(SourceError, match="disk is gone"):
            sync.push("a")
        assert "prepare" not in engine.calls
        assert len(list(segments.iterdir())) == 1
        with pytest.raises(SourceError, match="disk is gone"):
            sync.push("a")
        assert len(list(segments.iterdir())) == 1
    assert serves(engine) == ("start", None)
