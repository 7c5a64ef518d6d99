"""A source says that nothing has moved only where that is so, and never of tensors that it makes."""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.source_models import qwen3_moe
from peft import LoraConfig, get_peft_model
from torch import nn

from instep.source.guarded import Guarded
from instep.source.module import MappingSource, ModuleSource


def model() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_the_place_of_a_module_holds_while_its_tensors_lie_where_they_lay() -> None:
    module = model()
    source = Guarded(ModuleSource(module))
    first = source.look()
    with torch.no_grad():
        module[0].weight.add_(1)
    second = source.look()
    assert first.place is not None
    assert first.place == second.place
    assert first.stamp != second.stamp
    module[0].weight.data = module[0].weight.data.clone()
    assert source.look().place != first.place


def test_a_look_is_what_is_asked_one_by_one() -> None:
    source = ModuleSource(model())
    look = source.look()
    assert look.metadata is source.metadata()
    assert look.stamp == source.stamp()


def test_merged_weights_have_no_place() -> None:
    module = get_peft_model(model(), LoraConfig(target_modules=["0"]))
    assert Guarded(ModuleSource(module)).look().place is None


def test_experts_that_are_saved_one_by_one_are_views_that_stay() -> None:
    module = qwen3_moe()
    source = Guarded(ModuleSource(module))
    assert len(source.metadata()) > len(module.state_dict())
    first = source.look().place
    assert first is not None
    assert first == source.look().place
    module.model.layers[0].mlp.experts.gate_up_proj.data = module.model.layers[0].mlp.experts.gate_up_proj.data.clone()
    assert source.look().place != first


def test_views_of_experts_that_are_not_contiguous_have_no_place() -> None:
    module = qwen3_moe()
    experts = module.model.layers[0].mlp.experts
    experts.gate_up_proj.data = experts.gate_up_proj.data.transpose(1, 2).contiguous().transpose(1, 2)
    assert Guarded(ModuleSource(module)).look().place is None


def test_the_place_of_a_dict_holds_while_it_has_the_same_tensors() -> None:
    mapping = {"w": torch.ones(2), "b": torch.ones(3)}
    source = Guarded(MappingSource(mapping))
    first = source.look()
    mapping["w"].add_(1)
    second = source.look()
    assert first.place is not None
    assert (first.place, first.metadata) == (second.place, second.metadata)
    assert first.stamp != second.stamp


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda mapping: mapping.update(w=mapping["w"].clone()), id="another tensor"),
        pytest.param(lambda mapping: mapping["w"].set_(torch.ones(2)), id="other memory"),
        pytest.param(lambda mapping: mapping.update(more=torch.ones(1)), id="one more"),
        pytest.param(lambda mapping: mapping.update(b=mapping.pop("b"), w=mapping.pop("w")), id="another order"),
        pytest.param(lambda mapping: mapping.update(c=mapping.pop("b")), id="another name"),
        pytest.param(lambda mapping: mapping.update(b=mapping["w"]), id="tied"),
    ],
)
def test_a_dict_that_has_changed_has_another_place(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    mapping = {"w": torch.ones(2), "b": torch.ones(2)}
    source = Guarded(MappingSource(mapping))
    first = source.look()
    change(mapping)
    second = source.look()
    assert second.place not in (None, first.place)
    assert second.stamp != first.stamp
    assert second.metadata == MappingSource(dict(mapping)).metadata()


def test_a_dict_may_let_its_tensors_go() -> None:
    mapping = {"w": torch.ones(2)}
    source = MappingSource(mapping)
    source.look()
    old = weakref.ref(mapping["w"])
    mapping["w"] = torch.zeros(2)
    assert old() is None


def test_a_mapping_that_makes_its_values_has_no_place() -> None:
    source = Guarded(MappingSource(UserDict({"w": torch.ones(2)})))
    look = source.look()
    assert look.place is None
    assert (look.metadata, look.stamp) == (source.metadata(), source.stamp())


def test_a_source_that_gives_tensors_of_its_own_is_not_looked_at_as_what_it_inherits() -> None:
    class Doubled(MappingSource):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            return ((name, 2 * value) for name, value in super().tensors())

    assert Guarded(Doubled({"w": torch.ones(2)})).look().place is None
