"""Tensors for an engine's own loader are pulled many at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.pretend_cuda import Table, pretend

from instep import MemoryEngine, WeightSync
from instep.transport.ipc import read as ipc_reader

EXPERTS = 40


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, segments: Any) -> None:
    pretend(monkeypatch)


def mixture(seed: int, layers: int = 2) -> dict[str, torch.Tensor]:
    """A mixture of experts whose tensors have 24 and 40 words, and odd ones."""
    torch.manual_seed(seed)
    parts = {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}
    found = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": torch.randn(shape).bfloat16()
        for layer in range(layers)
        for expert in range(EXPERTS)
        for part, shape in parts.items()
    }
    return found | {"model.norm.weight": torch.randn(5).bfloat16()}


@pytest.mark.parametrize("together", [1, 1000, 1 << 20])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_first_push_brings_the_trainers_bytes_however_many_are_pulled_at_a_time(
    monkeypatch: pytest.MonkeyPatch, together: int, tp: int
) -> None:
    monkeypatch.setattr(ipc_reader, "TOGETHER", together)
    weights, engine = mixture(1), MemoryEngine(mixture(2), tp=tp)
    with WeightSync(source=weights, engines=[engine], transport="ipc") as sync:
        for version in ("first", "second"):
            (receipt,) = sync.push(version).engines
            assert engine.fingerprint() == MemoryEngine(weights, tp=tp).fingerprint()
            assert receipt.read_back == len(weights)
            for tensor in weights.values():
                tensor.neg_()


def test_a_first_push_makes_as_many_tables_for_many_experts_as_for_few() -> None:
    made = []
    for layers in (1, 4):
        before = Table.made
        with WeightSync(source=mixture(1, layers), engines=[MemoryEngine(mixture(2, layers))], transport="ipc") as sync:
            sync.push("first")
        made.append(Table.made - before)
    assert made[0] == made[1] < EXPERTS
