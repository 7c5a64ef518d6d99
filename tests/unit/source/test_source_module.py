"""A module source against `save_pretrained`. Numbers are those of the collection of failure cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.source_models import (
    TEXT,
    assert_same_bits,
    assert_source_equals,
    live_storages,
    llama,
    make,
    qwen2_5_vl,
    qwen3,
    saved,
)
from torch import nn
from transformers import AutoModel

from instep.errors import SourceError
from instep.source import Source, open_source
from instep.source.module import ModuleSource


def test_case_33_saved_names_of_a_vision_model_differ_from_live_ones() -> None:
    model = make("qwen2.5-vl")
    names = {meta.name for meta in ModuleSource(model).metadata()}
    assert "model.embed_tokens.weight" in names
    assert "model.language_model.embed_tokens.weight" in model.state_dict()
    assert not names & {name for name in model.state_dict() if name != "lm_head.weight"}


def test_case_37_packed_experts_come_out_one_by_one_as_views() -> None:
    model = make("qwen3-moe")
    packed = dict(model.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]
    tensors = dict(ModuleSource(model).tensors())
    for expert in range(3):
        for name, rows in (("gate_proj", slice(0, 24)), ("up_proj", slice(24, 48))):
            tensor = tensors[f"model.layers.1.mlp.experts.{expert}.{name}.weight"]
            assert_same_bits(tensor, packed[expert, rows], name)
            assert tensor.data_ptr() == packed[expert, rows].data_ptr()


@pytest.mark.parametrize("model", ["qwen3-tied", "llama-untied", "qwen3-moe", "qwen2.5-vl"])
def test_tensors_are_views_of_live_memory(model: str) -> None:
    module = make(model)
    for name, tensor in ModuleSource(module).tensors():
        assert tensor.untyped_storage().data_ptr() in live_storages(module), name
        assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("module", "alias"),
    [
        (qwen3(tied=True), ("lm_head.weight", "model.embed_tokens.weight")),
        (qwen3(tied=False), None),
        (llama(tied=True), ("lm_head.weight", "model.embed_tokens.weight")),
        (qwen2_5_vl(tied=True), ("lm_head.weight", "model.embed_tokens.weight")),
        (qwen2_5_vl(tied=False), None),
    ],
    ids=["head-tied", "head-untied", "llama-tied", "nested-tied", "nested-untied"],
)
def test_cases_65_66_a_tied_head_is_an_alias(module: nn.Module, alias: tuple[str, str] | None) -> None:
    source = ModuleSource(module)
    assert [(meta.name, meta.alias_of) for meta in source.metadata() if meta.alias_of] == ([alias] if alias else [])
    assert ("lm_head.weight" in dict(source.tensors())) == (alias is None)


def test_a_weight_tied_by_memory_alone_is_found() -> None:
    model = llama(tied=False)
    model.lm_head.weight.data = model.model.embed_tokens.weight.data
    assert_source_equals(ModuleSource(model), saved(model))
    assert ModuleSource(model).metadata()[-1].alias_of == "model.embed_tokens.weight"


def test_order_is_the_models_layer_by_layer() -> None:
    names = [meta.name for meta in ModuleSource(make("qwen3-moe")).metadata()]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert names[0] == "model.embed_tokens.weight"


def test_a_module_of_other_origin_has_its_state_dicts_names() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 3)
            self.module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.ones(2), persistent=False)

    module = Head()
    source = ModuleSource(module)
    state = module.state_dict()
    assert [meta.name for meta in source.metadata()] == list(state)
    assert source.metadata()[-1].alias_of == "embed.weight"
    assert_source_equals(source, {name: tensor for name, tensor in state.items() if name != "head.weight"})


def test_case_73_strided_parameters_give_their_logical_values() -> None:
    model = llama()
    for name in ("q_proj", "o_proj"):
        weight = getattr(model.model.layers[0].self_attn, name).weight
        weight.data = weight.data.t().contiguous().t()
    model.model.norm.weight.data = torch.randn(2, 32)[:, ::1].t()[:, 1]
    model.model.layers[1].input_layernorm.weight.data = torch.randn(1).expand(32)
    assert_source_equals(ModuleSource(model), saved(model))


def test_case_73_strided_packed_experts() -> None:
    model = make("qwen3-moe")
    packed = model.model.layers[0].mlp.experts.gate_up_proj
    packed.data = packed.data.transpose(0, 2).contiguous().transpose(0, 2)
    assert_source_equals(ModuleSource(model), saved(model))


def test_case_70_the_manifest_announces_the_dtype_that_is_sent() -> None:
    model = make("llama-untied", torch.float32)
    model.model.embed_tokens.to(torch.bfloat16)
    assert {meta.dtype for meta in ModuleSource(model).metadata()} == {"float32", "bfloat16"}
    assert_source_equals(ModuleSource(model), saved(model))


def _placeholder(param: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0)
    empty.ds_numel = param.numel()  # type: ignore[attr-defined]
    return empty


def _quantise(param: torch.Tensor) -> torch.Tensor:
    packed = torch.zeros(param.numel() // 2, 1, dtype=torch.uint8)
    packed.quant_state = object()  # type: ignore[attr-defined]
    return packed


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        pytest.param(_placeholder, "ZeRO-3", id="case-76-zero3-placeholder"),
        pytest.param(lambda param: param[:0], "no elements", id="case-76-empty"),
        pytest.param(_quantise, "quantised", id="case-83-packed-4-bit"),
        pytest.param(lambda param: param.to("meta"), "meta device", id="meta"),
        pytest.param(lambda param: param.to(torch.complex64), "complex64", id="dtype"),
    ],
)
def test_what_cannot_be_read_whole_is_refused_by_name(spoil: Any, text: str) -> None:
    model: Any = torch.compile(llama())
    source = ModuleSource(model)
    source.metadata()
    layer = model._orig_mod.model.layers[1].mlp.up_proj
    spoiled = spoil(layer.weight.detach())
    del layer.weight
    layer.register_buffer("weight", spoiled)
    for call in (source.metadata, lambda: list(source.tensors()), source.stamp):
        with pytest.raises(SourceError, match=f"model.layers.1.mlp.up_proj.weight .*{text}") as caught:
            call()
        assert caught.value.tensor == "model.layers.1.mlp.up_proj.weight"


def test_a_state_that_is_no_tensor_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 1}

    with pytest.raises(SourceError, match=r"0\._extra_state of the state dict is a dict"):
        ModuleSource(nn.Sequential(Extra(2, 3))).metadata()


def test_case_42_a_wrapper_that_hides_a_tensor_is_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 3)
            self.weight = nn.Parameter(torch.ones(1))

    with pytest.raises(SourceError, match=r"both become layer\.weight"):
        ModuleSource(nn.ModuleDict({"layer": Both()})).metadata()


def test_stamp_changes_with_an_optimizer_step_alone() -> None:
    model = make("qwen3-tied")
    source = ModuleSource(model)
    before = source.stamp()
    source.metadata()
    list(source.tensors())
    source.score([1, 2, 3])
    assert source.stamp() == before
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert source.stamp() == before
    optimizer.step()
    assert source.stamp() != before


def _resize(model: Any) -> None:
    model.resize_token_embeddings(71)


def _halve(model: Any) -> None:
    model.to(torch.float16)


def _replace(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(48, 32))


def _untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _drop_layer(model: Any) -> None:
    del model.model.layers[1]


@pytest.mark.parametrize("change", [_resize, _halve, _replace, _untie, _drop_layer])
def test_a_change_of_the_model_is_seen_at_once(change: Any) -> None:
    model = qwen3(tied=True)
    source = ModuleSource(model)
    before = source.stamp()
    source.metadata()
    change(model)
    assert source.stamp() != before
    assert_source_equals(source, saved(model))


def test_score_is_the_log_softmax_of_the_forward() -> None:
    tokens = [3, 1, 4, 1, 5]
    model = make("qwen3-tied").train()
    model.model.norm.eval()
    flags = [module.training for module in model.modules()]
    state, grads = torch.get_rng_state(), [param.requires_grad for param in model.parameters()]
    compiled: Any = torch.compile(model)
    scores = ModuleSource(compiled).score(tokens)
    assert flags == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert grads == [param.requires_grad for param in model.parameters()]

    logits = model.eval()(input_ids=torch.tensor([tokens])).logits[0].float()
    expected = [logits[i].log_softmax(0)[tokens[i + 1]].item() for i in range(len(tokens) - 1)]
    assert scores == pytest.approx(expected, abs=1e-6)


def test_score_works_out_of_a_failed_forward_with_the_flags_restored() -> None:
    model = make("qwen3-tied").train()
    with pytest.raises(IndexError):
        ModuleSource(model).score([1, TEXT["vocab_size"]])
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("module", [nn.Linear(2, 3), AutoModel.from_config(qwen3().config)], ids=["linear", "no-head"])
def test_score_is_none_without_a_language_models_head(module: nn.Module) -> None:
    assert ModuleSource(module).score([1, 2]) is None


@pytest.mark.parametrize("model", ["qwen3-moe", "lora"])
def test_reading_leaves_the_trainer_as_it_was(model: str) -> None:
    module = make(model).train()
    rng = torch.get_rng_state()
    before = [(name, param.requires_grad, param._version, param.data_ptr()) for name, param in module.named_parameters()]
    source = ModuleSource(module)
    for _ in range(2):
        source.metadata()
        list(source.tensors())
        source.stamp()
    assert before == [(name, param.requires_grad, param._version, param.data_ptr()) for name, param in module.named_parameters()]
    assert torch.equal(rng, torch.get_rng_state())
    assert all(part.training for part in module.modules())


def test_open_source_takes_a_module() -> None:
    source = open_source(llama())
    assert isinstance(source, ModuleSource)
    assert isinstance(source, Source)
