"""One push, seen from the trainer: what arrives, what is refused before a byte moves, what the receipt says."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, bits, checkpoint, described, differing
from torch import nn

from instep import MemoryEngine, WeightSync
from instep.errors import PlanError, SourceError, TransportError
from instep.protocol import TensorMeta
from instep.source.module import MappingSource
from instep.telemetry import Event
from instep.transport.auto import AutoTransport

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def no_segment_stays(segments: Path) -> Iterator[None]:
    yield
    assert list(segments.iterdir()) == []


def is_fresh(engine: MemoryEngine, tensors: Checkpoint) -> bool:
    fresh = MemoryEngine(tensors, tp=len(engine.hosts))
    return all(differing(new.model, old.model) == [] for new, old in zip(fresh.hosts, engine.hosts, strict=True)) and (
        fresh.fingerprint() == engine.fingerprint()
    )


def test_a_receipt_says_what_was_done() -> None:
    tensors = checkpoint(1)
    engines = [MemoryEngine(checkpoint(0)), MemoryEngine(checkpoint(0), tp=2)]
    with WeightSync(tensors, engines) as sync:
        receipt = sync.push("v1")
    assert (receipt.version, receipt.tensors, receipt.failed) == ("v1", len(tensors), ())
    assert receipt.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert [engine.engine for engine in receipt.engines] == [engine.name for engine in engines]
    assert len({engine.engine for engine in receipt.engines}) == 2
    assert {"connect", "plan", "publish", "prepare", "commit", "total"} <= receipt.seconds.keys()
    assert receipt.pause == max(engine.pause for engine in receipt.engines) > 0
    assert json.loads(json.dumps(receipt.as_dict()))["digest"] == receipt.digest
    assert f"v1: 0 MB in {len(tensors)} tensors to 2 engines" in str(receipt)


def without(*names: str) -> Callable[[Checkpoint], Checkpoint]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_transport_hears_once_that_a_push_begins(monkeypatch: pytest.MonkeyPatch, in_a_loop: bool) -> None:
    heard: list[AutoTransport] = []
    monkeypatch.setattr(AutoTransport, "prefetch", lambda transport: heard.append(transport))
    with WeightSync(checkpoint(1), [MemoryEngine(checkpoint(0))]) as sync:
        asyncio.run(sync.apush("v1")) if in_a_loop else sync.push("v1")
        assert len(heard) == 1
    with pytest.raises(TransportError, match="closed"):
        sync.push("v2")
    assert len(heard) == 1


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied_engine", [True, False])
def test_a_tied_trainer_reaches_tied_and_untied_engines(tp: int, tied_engine: bool) -> None:
    """`state_dict()` of a tied model names one tensor twice."""
    tensors = checkpoint(1, tied=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    engine = MemoryEngine(checkpoint(0, tied=tied_engine), tp=tp)
    with WeightSync(tensors, [engine]) as sync:
        for step in range(3):
            receipt = sync.push(f"v{step}")
            assert is_fresh(engine, without("lm_head.weight")(tensors) if tied_engine else tensors)
            with torch.no_grad():
                tensors["model.embed_tokens.weight"] += 1
    assert receipt.nbytes == sum(tensor.nbytes for name, tensor in tensors.items() if name != "lm_head.weight")


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)


def test_a_module_and_its_state_dict_are_the_same_source() -> None:
    trainer = Trainer()
    engine = MemoryEngine(trainer.state_dict())
    other = MemoryEngine(trainer.state_dict())
    with torch.no_grad():
        trainer.inner.weight.add_(1)
    with WeightSync(trainer, [engine]) as from_module, WeightSync(trainer.state_dict(), [other]) as from_mapping:
        assert from_module.push("v1").digest == from_mapping.push("v1").digest
    assert is_fresh(engine, trainer.state_dict())
    assert is_fresh(other, trainer.state_dict())


def replaced(name: str, tensor: torch.Tensor) -> Callable[[Checkpoint], Checkpoint]:
    return lambda tensors: tensors | {name: tensor}


K, V = Q.replace("q_proj", "k_proj"), Q.replace("q_proj", "v_proj")
REFUSED: dict[str, tuple[Callable[[Checkpoint], Checkpoint], str, str]] = {
    "missing tensor": (without("model.norm.weight"), "model.norm.weight", "nothing in the source fills model.norm.weight"),
    "only q_proj": (without(K, V), "model.layers.0.self_attn.qkv_proj.weight", f"in part only, by {Q}"),
    "only up_proj": (without("model.layers.1.mlp.gate_proj.weight"), "model.layers.1.mlp.gate_up_proj.weight", "in part only"),
    "unknown tensor": (replaced("model.rotary.inv_freq", torch.ones(4).bfloat16()), "model.rotary.inv_freq", "no module or parameter"),
    "wrong shape": (replaced(Q, torch.ones(8, 4).bfloat16()), Q, "[8, 4]"),
    "too large": (replaced(Q, torch.ones(12, 8).bfloat16()), Q, "[12, 8]"),
    "wrong dtype": (replaced(Q, torch.ones(8, 8)), Q, "float32 in the source, bfloat16 in the engine"),
    "untied checkpoint for a tied engine": (replaced("lm_head.weight", torch.ones(20, 8).bfloat16()), "lm_head.weight", "lm_head.weight"),
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("change", "tensor", "text"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_before_a_byte_moves(
    change: Callable[[Checkpoint], Checkpoint], tensor: str, text: str, tp: int, segments: Path
) -> None:
    """Invariant 4: the message names the tensor and the engine."""
    engine = MemoryEngine(checkpoint(0, tied=True), tp=tp, name="engine-7")
    events: list[Event] = []
    with WeightSync(change(checkpoint(1, tied=True)), [engine], sinks=[events.append]) as sync:
        with pytest.raises(PlanError) as caught:
            sync.push("v1")
        assert list(segments.iterdir()) == []
    assert text in str(caught.value)
    assert "engine-7" in str(caught.value)
    assert "next:" in str(caught.value)
    assert caught.value.tensor == tensor
    assert events[-1].error is caught.value
    assert "prepare" not in engine.calls
    assert is_fresh(engine, checkpoint(0, tied=True))
    assert engine.generate([1], max_tokens=1)


def test_a_good_source_is_taken_after_a_bad_one() -> None:
    engine = MemoryEngine(checkpoint(0))
    source = without(Q)(checkpoint(1))
    with WeightSync(source, [engine]) as sync:
        with pytest.raises(PlanError):
            sync.push("v1")
        source[Q] = checkpoint(1)[Q]
        sync.push("v1")
    assert is_fresh(engine, checkpoint(1))


def test_a_source_that_changes_its_dtypes_is_planned_again() -> None:
    source, engine = checkpoint(1, dtype=torch.float32), MemoryEngine(checkpoint(0))
    with WeightSync(source, [engine], cast=True) as sync:
        for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            source.update(checkpoint(step, dtype=dtype))
            sync.push(f"v{step}")
            assert is_fresh(engine, {name: tensor.bfloat16() for name, tensor in source.items()})


class Listed:
    """A source that says what it is told to."""

    def __init__(self, metas: list[TensorMeta], tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.metas, self.values = metas, tensors

    def metadata(self) -> list[TensorMeta]:
        return self.metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.values

    def stamp(self) -> int:
        return 0

    def score(self, token_ids: list[int]) -> None:
        return None


def test_a_name_that_occurs_twice_is_refused() -> None:
    tensors = checkpoint(1)
    source = Listed([*described(tensors), described(tensors)[0]], list(tensors.items()))
    with (
        WeightSync(source, [MemoryEngine(checkpoint(0))]) as sync,
        pytest.raises(PlanError, match=r"names 'model\.embed_tokens\.weight' twice"),
    ):
        sync.push("v1")


def test_an_empty_source_is_refused() -> None:
    with WeightSync({}, [MemoryEngine(checkpoint(0))]) as sync, pytest.raises(PlanError, match="no tensors"):
        sync.push("v1")


def test_values_that_are_not_what_was_announced() -> None:
    tensors = checkpoint(1)
    engine = MemoryEngine(checkpoint(0))
    with (
        WeightSync(Listed(described(tensors), list(tensors.items())[:-1]), [engine]) as sync,
        pytest.raises(SourceError, match=r"did not give lm_head\.weight"),
    ):
        sync.push("v1")
    assert is_fresh(engine, checkpoint(0))


def test_numbers_that_are_not_finite_are_sent_and_reported() -> None:
    source = checkpoint(1)
    source[Q][0, 0] = float("nan")
    source["model.norm.weight"][3] = float("-inf")
    engine = MemoryEngine(checkpoint(0))
    with WeightSync(source, [engine]) as sync:
        receipt = sync.push("v1")
        assert set(receipt.non_finite) == {Q, "model.norm.weight"}
        assert f"not finite: {', '.join(receipt.non_finite)}" in str(receipt)
        source[Q][0, 0] = source["model.norm.weight"][3] = 0
        assert sync.push("v2").non_finite == ()
    assert torch.equal(bits(engine.hosts[0].model.get_parameter("model.norm.weight")), bits(source["model.norm.weight"]))


@pytest.mark.parametrize(("caches", "stale"), [("reset", False), ("keep", True)])
def test_the_prefix_cache(caches: Any, stale: bool) -> None:
    """`keep` accepts what was computed with the old weights, `reset` leaves nothing of it."""
    engine = MemoryEngine(checkpoint(0))
    before = engine.generate([1, 2], max_tokens=4)
    with WeightSync(checkpoint(1), [engine], caches=caches) as sync:
        sync.push("v1")
    assert (engine.generate([1, 2], max_tokens=4) == before) == stale
    assert engine.generate([3], max_tokens=4) == MemoryEngine(checkpoint(1)).generate([3], max_tokens=4)


def test_no_room_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MemoryEngine(checkpoint(0))
    monkeypatch.setattr(os, "statvfs", lambda path: type("", (), {"f_bavail": 0, "f_frsize": 1}))
    with WeightSync(checkpoint(1), [engine], transport="shm") as sync:
        with pytest.raises(TransportError, match="has 0 MiB free") as caught:
            sync.push("v1")
        assert "next:" in str(caught.value)
        monkeypatch.undo()
        sync.push("v1")
    assert is_fresh(engine, checkpoint(1))


def test_a_list_that_a_source_changes_in_place_is_checked_again() -> None:
    tensors = checkpoint(1)

    class Listed(MappingSource):
        listed: list[TensorMeta] = []  # noqa: RUF012

        def metadata(self) -> list[TensorMeta]:
            self.listed[:] = self.listed or super().metadata()
            return self.listed

    source = Listed(tensors)
    with WeightSync(source, [MemoryEngine(checkpoint(0))]) as sync:
        sync.push("v1")
        sync.push("v2")
        source.listed.append(source.listed[0])
        with pytest.raises(PlanError, match="twice"):
            sync.push("v3")
        with pytest.raises(PlanError, match="twice"):
            sync.push("v3")
        source.listed.pop()
        sync.push("v3")


def test_progress_is_told_a_hundred_times_at_most() -> None:
    tensors = {f"{index}.weight": torch.full((2,), float(index)) for index in range(500)}
    events: list[Event] = []
    with WeightSync(tensors, [MemoryEngine(tensors)], sinks=[events.append]) as sync:
        receipt = sync.push("v1")
    told = [event.nbytes for event in events if event.kind == "bytes"]
    assert 50 <= len(told) <= 100
    assert told[-1] == receipt.nbytes
