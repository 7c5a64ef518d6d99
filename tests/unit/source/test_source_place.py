"""A source says that nothing has moved only where that is so, and never of tensors that it makes."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from instep.source.guarded import Guarded
from instep.source.module import MappingSource, ModuleSource


def model() -> nn.Module:
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


def test_a_source_that_does_not_know_has_none() -> None:
    source = Guarded(MappingSource({"w": torch.ones(2)}))
    look = source.look()
    assert look.place is None
    assert (look.metadata, look.stamp) == (source.metadata(), source.stamp())
