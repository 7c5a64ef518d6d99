"""Completeness counts memory, not names: what a version brings for one tensor of an engine is one thing, whatever names it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.toys import ToyHost, bits
from torch import nn

from instep import TransformersEngine, WeightSync
from instep.errors import PlanError
from unit.transport.test_ipc import ToyEngine

pytestmark = pytest.mark.usefixtures("segments")


class Model(nn.Module):
    """Embedding and head, of which `tie` makes one."""

    def __init__(self, tie: Any) -> None:
        super().__init__()
        self.embed, self.head = (nn.Linear(6, 4, bias=False) for _ in range(2))
        tie(self)


def one_parameter(model: Any) -> None:
    model.head.weight = model.embed.weight


def two_parameters(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.data)


def a_view(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.data[:3])


def turned(model: Any) -> None:
    square = torch.zeros(4, 4)
    model.embed.weight, model.head.weight = nn.Parameter(square), nn.Parameter(square.t())


def as_bytes(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.data.view(torch.uint8)[:, :5], requires_grad=False)


def fill(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of each parameter, in memory of its own."""
    return {name: torch.ones_like(param) for name, param in model.named_parameters(remove_duplicate=False)}


def push(host: ToyHost, source: dict[str, torch.Tensor]) -> Any:
    with WeightSync(source, [ToyEngine(host)], transport="shm") as sync:
        return sync.push("one")


@pytest.mark.parametrize("tie", [one_parameter, two_parameters, a_view, turned, as_bytes])
def test_two_values_for_one_tensor_are_refused_before_anything_moves(tie: Any) -> None:
    """Also where they are equal now: the next step of the trainer may part them."""
    host = ToyHost(Model(tie), fill)
    before = bits(host.model.embed.weight).clone()
    with pytest.raises(PlanError, match=r"\.weight (are one tensor|share memory) in the engine") as caught:
        push(host, weights_of(host.model))
    assert "tie_word_embeddings" in str(caught.value)
    assert torch.equal(bits(host.model.embed.weight), before)


def side_by_side(model: Any) -> None:
    both = torch.zeros(8, 6)
    model.embed.weight, model.head.weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])


def columns_between_columns(model: Any) -> None:
    both = torch.zeros(4, 12)
    model.embed.weight, model.head.weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])


@pytest.mark.parametrize("lie", [side_by_side, columns_between_columns])
def test_tensors_that_only_share_a_storage_are_none(lie: Any) -> None:
    host = ToyHost(Model(lie), fill)
    source = weights_of(host.model)
    source["head.weight"].fill_(2)
    push(host, source)
    assert torch.equal(host.model.embed.weight, source["embed.weight"])
    assert torch.equal(host.model.head.weight, source["head.weight"])


def both(model: Any, name: str, tensor: torch.Tensor) -> None:
    """A loader that writes the second name too."""
    model.embed.weight.copy_(tensor)
    model.head.weight.copy_(tensor)


@pytest.mark.parametrize("tie", [one_parameter, two_parameters])
def test_the_same_tensor_for_both_names_is_no_contradiction(tie: Any) -> None:
    host = ToyHost(Model(tie), both)
    source = {"embed.weight": torch.rand(4, 6)}
    push(host, source)
    assert torch.equal(host.model.head.weight, source["embed.weight"])


@pytest.mark.parametrize("tie", [one_parameter, two_parameters])
def test_a_tied_trainer_fits_tied_and_untied_engines(tie: Any) -> None:
    shared = torch.rand(4, 6)
    for host in (ToyHost(Model(tie), fill), ToyHost(Model(lambda model: None), fill)):
        push(host, {"embed.weight": shared, "head.weight": shared})
        assert torch.equal(host.model.embed.weight, shared)
        assert torch.equal(host.model.head.weight, shared)


def tiny(seed: int, *, tied: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied))


@pytest.mark.parametrize(("trainer", "engine"), [(False, False), (True, False), (True, True), (False, True)])
def test_language_models_of_which_one_ties_its_head(trainer: bool, engine: bool) -> None:
    source, served = tiny(1, tied=trainer), tiny(2, tied=engine)
    with WeightSync(source, [TransformersEngine(served)]) as sync:
        if (trainer, engine) == (False, True):
            with pytest.raises(PlanError, match=r"lm_head\.weight are one tensor in the engine"):
                sync.push("one")
            return
        for version in ("one", "two"):
            with torch.no_grad():
                for param in source.parameters():
                    param.mul_(1.5)
            sync.push(version)
            tokens = torch.tensor([[1, 2, 3]])
            assert torch.equal(served(input_ids=tokens).logits, source(input_ids=tokens).logits)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer is part of the adapter:UserWarning")
def test_what_peft_unties_is_refused_by_an_engine_that_ties_it() -> None:
    """`modules_to_save` gives the embedding a copy of its own, and leaves the head the old one."""
    from peft import LoraConfig, get_peft_model

    trainer = get_peft_model(tiny(1, tied=True), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    with WeightSync(trainer, [TransformersEngine(tiny(2, tied=True))]) as sync, pytest.raises(PlanError, match="one tensor in the engine"):
        sync.push("one")
