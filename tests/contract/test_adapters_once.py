"""What a trainer's forward computes is what is pushed, and no engine applies an adapter twice."""

from __future__ import annotations

import pytest
import torch
from helpers.source_models import assert_source_equals, llama, lora, qwen3, saved

from instep import Adapter, MemoryEngine, TransformersEngine, WeightSync
from instep.errors import PlanError, SourceError
from instep.source.module import ModuleSource

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return lora(llama().float(), target_modules=["q_proj", "up_proj"], init_lora_weights=False)


@pytest.fixture
def engine() -> TransformersEngine:
    return TransformersEngine(llama().float())


@pytest.mark.parametrize("of", ["peft model", "base model"])
def test_within_disable_adapter_the_base_weights_are_pushed(model: torch.nn.Module, engine: TransformersEngine, of: str) -> None:
    source = model if of == "peft model" else model.get_base_model()
    with WeightSync(source, [engine], canary=TOKENS[0].tolist(), canary_bound=1e-3) as sync:
        sync.push("with")
        with model.disable_adapter():
            sync.push("without")
            without = _logits(source)
            assert torch.allclose(_logits(engine.model), without, atol=1e-4)
        assert not torch.allclose(_logits(source), without, atol=1e-2), "the adapter changes nothing, so the test says nothing"
        sync.push("with-again")
        assert torch.allclose(_logits(engine.model), _logits(source), atol=1e-4)


def test_a_saved_head_is_left_out_within_disable_adapter() -> None:
    model = lora(qwen3(tied=False), modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.add_(1)
    source, base = ModuleSource(model), qwen3(tied=False)
    base.lm_head.weight = model.base_model.model.lm_head.original_module.weight
    with model.disable_adapter():
        found = dict(source.tensors())["lm_head.weight"]
    assert torch.equal(found, base.lm_head.weight)
    assert_source_equals(source, saved(model))


def test_trained_tokens_are_left_out_within_disable_adapter() -> None:
    model = lora(qwen3(tied=False), trainable_token_indices={"embed_tokens": [1, 5]})
    wrapper = model.base_model.model.model.embed_tokens
    with torch.no_grad():
        wrapper.token_adapter.trainable_tokens_delta["default"].add_(1)
    with model.disable_adapter():
        assert torch.equal(dict(ModuleSource(model).tensors())["model.embed_tokens.weight"], wrapper.token_adapter.base_layer.weight)


def test_an_adapter_that_is_merged_and_disabled_is_refused_with_the_way_out(model: torch.nn.Module) -> None:
    model.merge_adapter()
    with model.disable_adapter(), pytest.raises(SourceError, match=r"merged into the base weights and disabled(.|\n)*unmerge_adapter"):
        ModuleSource(model).metadata()


@pytest.fixture
def serving() -> MemoryEngine:
    return MemoryEngine(saved(llama()))


def test_merged_weights_are_refused_where_an_adapter_is_served(serving: MemoryEngine) -> None:
    model = lora(llama(), target_modules=["q_proj"])
    adapter, whole = WeightSync(Adapter(model), [serving]), WeightSync(model, [serving])
    adapter.push("a1")
    before = serving.fingerprint()
    with pytest.raises(PlanError, match=r"serves adapter 1 beside them(.|\n)*disable_adapter"):
        whole.push("m1")
    assert serving.fingerprint() == before
    with model.disable_adapter():
        whole.push("base")
    adapter.push("a2")
    with pytest.raises(PlanError, match="serves adapter 1"):
        whole.push("m2")


def test_an_adapter_is_refused_where_one_is_merged_into_the_base_weights(serving: MemoryEngine) -> None:
    model = lora(llama(), target_modules=["q_proj"])
    adapter, whole = WeightSync(Adapter(model), [serving]), WeightSync(model, [serving])
    whole.push("m1")
    with pytest.raises(PlanError, match=r"have an adapter merged into them(.|\n)*disable_adapter"):
        adapter.push("a1")
    with model.disable_adapter():
        whole.push("base")
    adapter.push("a1")


def test_merged_in_place_counts_as_merged(serving: MemoryEngine) -> None:
    model = lora(llama(), target_modules=["q_proj"])
    WeightSync(Adapter(model), [serving]).push("a1")
    model.merge_adapter()
    with pytest.raises(PlanError, match="serves adapter 1"):
        WeightSync(model, [serving]).push("m1")
