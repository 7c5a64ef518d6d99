"""Weights that a trainer computes from others arrive as its forward outside of training uses them; averages are their module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.source_models import assert_source_equals, llama, lora, saved
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from instep.errors import SourceError
from instep.source.module import ModuleSource
from instep.source.sharded import ShardedModule

HEAD = "lm_head.weight"


class LowRank(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(len(weight), 2, dtype=weight.dtype))
        self.b = nn.Parameter(torch.randn(2, weight.shape[1], dtype=weight.dtype))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


def by_rank(head: Any) -> None:
    parametrize.register_parametrization(head, "weight", LowRank(head.weight))


def with_norm(head: Any) -> None:
    with warnings.catch_warnings(action="ignore"):
        nn.utils.weight_norm(head)


def pruned(head: Any) -> None:
    prune.random_unstructured(head, "weight", 0.3)


WAYS: dict[str, Callable[[Any], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": lambda head: parametrizations.spectral_norm(head.float()),
    "a module of the user's": by_rank,
    "weight_norm by a hook": with_norm,
    "spectral_norm by a hook": lambda head: nn.utils.spectral_norm(head.float()),
    "pruned": pruned,
}


def stepped(way: Callable[[Any], object]) -> Any:
    """A model after a step that its hooks have not seen."""
    model = llama()
    way(model.lm_head)
    with torch.no_grad():
        for param in model.lm_head.parameters():
            param.mul_(-1.5)
    return model


def used(model: Any) -> torch.Tensor:
    """The head that a forward uses."""
    head = model.lm_head.eval()
    head(torch.zeros(1, head.in_features, dtype=next(head.parameters()).dtype))
    weight: torch.Tensor = head.weight
    return weight.detach()


def held(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_computed_weight_is_sent_as_a_forward_uses_it_and_the_trainer_stays_as_it_is(way: Any) -> None:
    model = stepped(way)
    source, before = ModuleSource(model), held(model)
    assert {meta.name for meta in source.metadata()} == llama().state_dict().keys()
    found = {name: tensor.clone() for name, tensor in source.tensors()}
    list(source.again())
    assert all(torch.equal(tensor, before[name]) for name, tensor in held(model).items())
    assert torch.equal(found[HEAD], used(model))


@pytest.mark.parametrize("way", [parametrizations.weight_norm, with_norm])
def test_a_rank_makes_a_computed_weight_of_what_the_ranks_hold(way: Any) -> None:
    model = stepped(way)
    module = ShardedModule(model)
    description = module.describe()
    assert description.made == [HEAD]
    assert {meta.name for meta in description.parts} == {name for name in model.state_dict() if name.startswith("lm_head.")}
    values = {meta.name: module.local(meta.name).detach().clone() for meta in description.parts}
    made = module.make(HEAD, lambda names: {name: values[name] for name in names})
    assert torch.equal(made[HEAD], used(model))


def test_a_step_is_seen_in_what_a_weight_is_computed_of() -> None:
    model = stepped(parametrizations.weight_norm)
    source = ModuleSource(model)
    list(source.tensors())
    with torch.no_grad():
        model.lm_head.parametrizations.weight.original0.mul_(2)
    with pytest.raises(SourceError, match="changed"):
        list(source.again())


def test_an_adapter_on_a_computed_weight_is_refused_with_what_to_do() -> None:
    model = lora(llama())
    parametrizations.weight_norm(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer)
    with pytest.raises(SourceError, match=r"self_attn\.q_proj has an adapter on weights that are parametrized") as caught:
        ModuleSource(model).metadata()
    assert "remove_parametrizations" in str(caught.value)


@pytest.mark.parametrize("adapters", [False, True])
def test_an_average_is_its_module(adapters: bool) -> None:
    model = lora(llama()) if adapters else llama()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(-1.5)
        average.update_parameters(model)
    assert_source_equals(ModuleSource(average), saved(average.module))
    assert_source_equals(ModuleSource(torch.compile(average)), saved(average.module))


def test_an_adapter_that_peft_cannot_merge_is_refused_with_what_to_do() -> None:
    """Its bias has no place in a layer without one. peft says the same."""
    model = lora(llama(), target_modules=["o_proj"], lora_bias=True)
    with pytest.raises(SourceError, match=r"peft cannot merge the adapter of model\.layers\.0\.self_attn\.o_proj") as caught:
        list(ModuleSource(model).tensors())
    assert "merge_and_unload" in str(caught.value)
    with pytest.raises(RuntimeError):
        model.merge_and_unload()
