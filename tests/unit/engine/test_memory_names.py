"""The engine in memory takes tensors of any name."""

from __future__ import annotations

import pytest
import torch

from instep import MemoryEngine, WeightSync
from instep.engine.memory_host import MemoryHost
from instep.protocol import TensorMeta

NAMES = [
    ["bfloat16.weight", "forward.weight", "layers.0.named_modules.to.bias"],
    ["training", "T_destination", "_parameters", "_modules.weight", "_modules.qkv_proj.weight"],
    ["a", "a.b", "a.b.c", "a~", "a.b~"],
    ["", ".a", "a.", "a..b", "~a", "~"],
    ["q_proj.weight", "k_proj.weight", "v_proj.bias"],
    ["x.q_proj.qweight", "x.q_proj.scale", "y.q_proj.scale", "y.q_proj.weight"],
    ["~forward.weight", "forward.weight", "w 1/ü"],
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("names", NAMES)
def test_tensors_of_any_name_are_pushed(names: list[str], tp: int) -> None:
    weights = {name: torch.full((8, 4), float(index)) for index, name in enumerate(names)}
    engine = MemoryEngine({name: torch.zeros(8, 4) for name in names}, tp=tp)
    with WeightSync(weights, [engine]) as sync:
        for version in "abc":
            for tensor in weights.values():
                tensor.add_(1)
            sync.push(version)
            assert engine.fingerprint() == MemoryEngine(weights, tp=tp).fingerprint()


def test_tensors_without_an_axis_are_whole_on_each_worker() -> None:
    weights = {"q_proj.scale": torch.tensor(1.0), "o_proj.weight": torch.arange(4.0)}
    engine = MemoryEngine({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, tp=2)
    with WeightSync(weights, [engine]) as sync:
        sync.push("a")
    assert engine.fingerprint() == MemoryEngine(weights, tp=2).fingerprint()


def test_an_adapter_of_a_layer_of_any_name_is_installed_under_that_name() -> None:
    host = MemoryHost({"forward.weight": torch.zeros(4, 4)}, 0, 1)
    adapter, name = host.adapter(1), "base_model.model.forward.lora_A.weight"
    adapter.expect([TensorMeta(name, "float32", (2, 4))], "{}")  # type: ignore[attr-defined]
    with adapter.reload():
        adapter.load([(name, torch.ones(2, 4))])
    assert {name: tensor.sum().item() for name, tensor in host.adapters[1].items()} == {name: 8.0}
