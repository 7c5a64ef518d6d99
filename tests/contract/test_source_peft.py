"""Adapters merged on the way out, against peft's own `merge_and_unload`. Numbers are those of the collection of failure cases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.source_models import assert_same_bits, assert_source_equals, llama, lora, make, qwen2_5_vl, qwen3, qwen3_moe, saved
from peft import AdaLoraConfig, IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from instep import MemoryEngine, WeightSync
from instep.errors import SourceError
from instep.source.bare import merge
from instep.source.module import ModuleSource
from instep.transport import copying

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _biased() -> Any:
    model = llama()
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 48, bias=True)
    return lora(model, target_modules=["layers.0.mlp.up_proj"], lora_bias=True)


def _two_active() -> Any:
    model = lora(llama())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj", "o_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return model


def _inside_transformers() -> Any:
    model = llama()
    model.add_adapter(LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))
    return model


def _trained_tokens() -> Any:
    model = lora(qwen3(tied=True), trainable_token_indices={"embed_tokens": [1, 5]})
    for name, param in model.named_parameters():
        if "trainable_tokens_delta" in name:
            nn.init.normal_(param)
    return model


ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora-tied": lambda: lora(qwen3(tied=True)),
    "lora-vision": lambda: lora(qwen2_5_vl(), target_modules=["q_proj", "qkv", "up_proj"]),
    "rslora": lambda: lora(llama(), use_rslora=True),
    "dora": lambda: lora(llama(), use_dora=True),
    "lora-bias": _biased,
    "lora-embedding": lambda: lora(llama(), target_modules=["embed_tokens", "lm_head"]),
    "lora-packed-experts": lambda: lora(qwen3_moe(), target_modules=["q_proj"], target_parameters=EXPERTS),
    "lora-one-packed-expert": lambda: lora(qwen3_moe(), target_modules=[], target_parameters=EXPERTS[:1]),
    "two-active": _two_active,
    "saved-head-untied": lambda: lora(qwen3(tied=False), modules_to_save=["lm_head"]),
    "saved-head-of-tied": lambda: lora(qwen3(tied=True), modules_to_save=["lm_head"]),
    "saved-both-tied": lambda: lora(qwen3(tied=True), modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "trained-tokens-tied": _trained_tokens,
    "ia3": lambda: get_peft_model(llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False)),
    "adalora": lambda: get_peft_model(llama(), AdaLoraConfig(target_modules=["q_proj"], total_step=10, init_lora_weights=False)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_case_86_every_trained_part_arrives_merged(adapter: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = ADAPTERS[adapter]().to(dtype)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert_source_equals(ModuleSource(model), saved(model))
    for name, param in model.named_parameters():
        assert_same_bits(param.detach(), before[name], name)


def test_an_adapter_that_transformers_added_itself() -> None:
    model = _inside_transformers()
    weight, layer = model.model.layers[0].self_attn.q_proj.base_layer.weight, model.model.layers[0].self_attn.q_proj
    merged = weight.detach().clone() + layer.get_delta_weight("default").detach()
    tensors = dict(ModuleSource(model).tensors())
    assert_same_bits(tensors["model.layers.0.self_attn.q_proj.weight"], merged, "q_proj")
    assert set(tensors) == set(llama().state_dict())


def test_case_79_a_thousand_reads_do_not_move_the_base_by_one_bit() -> None:
    torch.manual_seed(0)
    base = llama()
    del base.model.layers[1]
    model = lora(base, target_modules=["q_proj"]).to(torch.bfloat16)
    source = ModuleSource(model)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = {name: tensor.clone() for name, tensor in source.tensors()}
    for _ in range(1000):
        last = dict(source.tensors())
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, start[name], name)
    for name, tensor in first.items():
        assert_same_bits(last[name], tensor, name)


@pytest.mark.parametrize("model", ["lora", "lora-saved-head", "lora-second-adapter"])
def test_case_81_an_optimizer_step_changes_what_is_sent(model: str) -> None:
    module = make(model)
    source = ModuleSource(module)
    stamp, before = source.stamp(), {name: tensor.clone() for name, tensor in source.tensors()}
    trained = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=10.0)
    module(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    assert source.stamp() != stamp
    changed = {name for name, tensor in source.tensors() if not torch.equal(tensor, before[name])}
    expected = {f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in ("q_proj", "v_proj")}
    assert changed == expected | ({"lm_head.weight"} if model == "lora-saved-head" else set())


@pytest.mark.usefixtures("segments")
def test_a_push_merges_each_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one too: where its bytes are is known before they are computed."""
    model, merged = lora(llama(), target_modules=["embed_tokens", "lm_head"]), []

    def counted(path: str, layer: Any) -> dict[str, torch.Tensor]:
        merged.append(path)
        return merge(path, layer)

    monkeypatch.setattr("instep.source.snapshot.merge", counted)
    with WeightSync(model, [MemoryEngine(saved(model))]) as sync:
        sync.push("v1")
    assert merged == ["model.embed_tokens", "lm_head"]


def test_case_70_adapters_in_fp32_do_not_change_the_dtype_of_the_base() -> None:
    model = lora(llama().to(torch.bfloat16))
    assert {param.dtype for name, param in model.named_parameters() if "lora_" in name} == {torch.float32}
    assert {meta.dtype for meta in ModuleSource(model).metadata()} == {"bfloat16"}
    assert_source_equals(ModuleSource(model), saved(model))


def test_case_83_a_quantised_base_under_an_adapter_is_refused() -> None:
    model = lora(llama())
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    weight.data = torch.zeros(512, 1, dtype=torch.float32)
    weight.quant_state = object()
    with pytest.raises(SourceError, match=r"q_proj\.base_layer\.weight is quantised"):
        ModuleSource(model).metadata()


def test_a_merged_adapter_is_not_merged_again() -> None:
    model = make("lora")
    source = ModuleSource(model)
    names = {meta.name for meta in source.metadata()}
    before = source.stamp()
    model.merge_adapter()
    assert source.stamp() != before
    state = model.base_model.model.state_dict()
    for name, tensor in source.tensors():
        live = state.get(name, state.get(name.replace(".weight", ".base_layer.weight")))
        assert tensor.data_ptr() == live.data_ptr(), name
    assert {meta.name for meta in source.metadata()} == names


def _add_adapter(model: Any) -> None:
    model.add_adapter("new", LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    model.set_adapter("new")


def _switch_adapter(model: Any) -> None:
    model.set_adapter("other")


def _scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


@pytest.mark.parametrize("change", [_add_adapter, _switch_adapter, _scale])
def test_a_change_of_adapters_is_seen_at_once(change: Callable[[Any], None]) -> None:
    model = make("lora-second-adapter")
    source = ModuleSource(model)
    before = source.stamp()
    change(model)
    assert source.stamp() != before
    assert_source_equals(source, saved(model))


def test_one_merged_layer_is_held_at_a_time() -> None:
    model = lora(llama(), target_modules="all-linear")
    held: list[Any] = []
    source = ModuleSource(model)
    live = {param.untyped_storage().data_ptr() for param in model.parameters()}
    for _, tensor in source.tensors():
        if tensor.untyped_storage().data_ptr() not in live:
            held.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
        assert sum(not one.expired() for one in held) <= 2
    assert len(held) == 14


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="+".join)
def test_an_adapter_on_one_of_two_tied_weights_is_refused(targets: list[str]) -> None:
    model = lora(qwen3(tied=True), target_modules=targets)
    tokens = torch.tensor([[1, 2, 3]])
    merged = copy.deepcopy(model).merge_and_unload()
    with torch.no_grad():
        assert not torch.allclose(model(tokens).logits, merged(tokens).logits, atol=1e-2), "merging would be right after all"
    with pytest.raises(SourceError, match=r"model\.embed_tokens\.weight and lm_head\.weight are tied, but their adapters differ"):
        ModuleSource(model).metadata()


def test_a_prompt_adapter_is_refused() -> None:
    model = get_peft_model(llama(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(SourceError, match="a PROMPT_TUNING adapter cannot be merged"):
        ModuleSource(model).metadata()


def test_score_uses_the_adapter() -> None:
    model = make("lora", torch.float32)
    merged = copy.deepcopy(model).merge_and_unload()
    tokens = [1, 2, 3, 4]
    assert ModuleSource(model).score(tokens) == pytest.approx(ModuleSource(merged).score(tokens), abs=1e-4)
    assert ModuleSource(model).score(tokens) != pytest.approx(ModuleSource(model.unload()).score(tokens), abs=1e-4)


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "base_layer", "lm_head"])
def test_an_adapter_that_changes_between_the_reads_is_found_out(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged weights are computed once: the tensors that they are made of are looked at before and after."""
    model = lora(llama(), target_modules=["q_proj"])
    name, param = next((name, param) for name, param in model.named_parameters() if part in name)
    engine = MemoryEngine(saved(llama()))
    before, second = engine.fingerprint(), copying.second
    torn = iter([True])

    def changed(*arguments: Any) -> Any:
        if next(torn, False):
            param.data.view(-1)[-1] += 1
        return second(*arguments)

    monkeypatch.setattr(copying, "second", changed)
    with WeightSync(model, [engine]) as sync:
        with pytest.raises(SourceError, match="changed its weights"):
            sync.push("torn")
        assert engine.fingerprint() == before, name
        sync.push("b")
    assert engine.fingerprint() == MemoryEngine(saved(copy.deepcopy(model).merge_and_unload())).fingerprint()
