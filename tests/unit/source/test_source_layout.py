"""Checkpoint formats that move or join tensors when a model is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.source_models import assert_source_equals, live_storages, llama, lora, saved
from transformers.core_model_loading import Chunk, Interleave, PermuteForRope, Transpose, WeightConverter, WeightRenaming

from instep.errors import SourceError
from instep.source.module import ModuleSource

JOIN = WeightConverter("mlp.gate_up_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
FORMATS: dict[str, tuple[Callable[[], WeightConverter], str, bool]] = {
    "joined": (lambda: JOIN, "mlp.gate_up_proj", False),
    "transposed": (lambda: WeightConverter("wi.weight", "mlp.up_proj.weight", [Transpose(0, 1)]), "wi", True),
    "square-transposed": (lambda: WeightConverter("wq.weight", "self_attn.q_proj.weight", [Transpose(0, 1)]), "wq", True),
    "interleaved": (lambda: WeightConverter("wi.weight", "mlp.up_proj.weight", [Interleave(dim=0)]), "wi", False),
    "permuted": (
        lambda: WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", [PermuteForRope(permute_layer_names=["q_proj"])]),
        "q_proj",
        False,
    ),
}


def _model(form: str) -> Any:
    torch.manual_seed(0)
    model = llama().to(torch.bfloat16)
    model._weight_conversions = [FORMATS[form][0]()]
    return model


@pytest.mark.parametrize("form", FORMATS)
def test_bits_are_those_of_save_pretrained(form: str) -> None:
    model = _model(form)
    expected = saved(model)
    assert any(FORMATS[form][1] in name for name in expected)
    source = ModuleSource(model)
    assert_source_equals(source, expected)
    for name, tensor in source.tensors():
        is_view = tensor.untyped_storage().data_ptr() in live_storages(model)
        assert is_view == (FORMATS[form][2] or FORMATS[form][1] not in name), name


@pytest.mark.parametrize("form", ["joined", "transposed"])
def test_values_are_read_anew_each_time(form: str) -> None:
    model = _model(form)
    source = ModuleSource(model)
    list(source.tensors())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    assert_source_equals(source, saved(model))


@pytest.mark.parametrize("form", FORMATS)
def test_merged_adapters_go_through_the_format(form: str) -> None:
    model = lora(_model(form), target_modules=["q_proj", "up_proj"])
    assert_source_equals(ModuleSource(model), saved(model))


def test_joined_tensors_stay_in_their_layer() -> None:
    names = [meta.name for meta in ModuleSource(_model("joined")).metadata() if ".layers." in meta.name]
    assert [int(name.split(".")[2]) for name in names] == [0] * 8 + [1] * 8


def test_case_42_a_format_that_gives_two_tensors_one_name_is_refused() -> None:
    model = llama()
    model._weight_conversions = [WeightRenaming("input_layernorm", "post_attention_layernorm")]
    with pytest.raises(SourceError, match=r"no place for model\.layers\.0\.(input|post_attention)_layernorm\.weight"):
        ModuleSource(model).metadata()


def test_a_conversion_that_fails_is_an_error_of_the_source() -> None:
    model = llama()
    model._weight_conversions = [WeightConverter("wq.weight", "self_attn.q_proj.weight", [Transpose(0, 5)])]
    with pytest.raises(SourceError, match="transformers cannot convert LlamaForCausalLM"):
        ModuleSource(model).metadata()
