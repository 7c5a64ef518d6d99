"""Tiny models with no two dimensions equal, wrappers around them, and what `save_pretrained` writes for them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from instep.source import Source

logging.disable_progress_bar()

TEXT: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]}


def qwen3(tied: bool = True) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**TEXT, tie_word_embeddings=tied))


def llama(tied: bool = False) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=tied))


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24))


def qwen2_5_vl(tied: bool = True) -> PreTrainedModel:
    config = Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=VISION, tie_word_embeddings=tied)
    return Qwen2_5_VLForConditionalGeneration(config)


def lora(model: nn.Module, **settings: Any) -> Any:
    """`model` with an adapter that is not zero."""
    return get_peft_model(model, LoraConfig(**{"r": 3, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **settings}))


def lora_with_saved_head() -> Any:
    model = lora(llama(), modules_to_save=["lm_head"])
    nn.init.normal_(model.base_model.model.lm_head.modules_to_save["default"].weight)
    return model


def lora_with_second_adapter() -> Any:
    model = lora(llama())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False, modules_to_save=["norm"]))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3-tied": qwen3,
    "llama-untied": llama,
    "qwen3-moe": qwen3_moe,
    "qwen2.5-vl": qwen2_5_vl,
    "lora": lambda: lora(llama()),
    "lora-saved-head": lora_with_saved_head,
    "lora-second-adapter": lora_with_second_adapter,
}


def make(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype)


def _layers(module: nn.Module) -> Iterable[tuple[nn.Module, str, nn.Module]]:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("DecoderLayer"):
                yield parent, name, child


def compile_layers(module: nn.Module) -> nn.Module:
    for parent, name, child in _layers(module):
        parent._modules[name] = torch.compile(child)  # type: ignore[assignment]
    return module


def checkpoint_layers(module: nn.Module) -> nn.Module:
    wanted = {child for _, _, child in _layers(module)}
    apply_activation_checkpointing(module, check_fn=wanted.__contains__)
    return module


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": DistributedDataParallel,
    "compile": torch.compile,
    "compiled-layers": compile_layers,
    "checkpointed-layers": checkpoint_layers,
}


def saved(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that `save_pretrained` writes for the model, adapters merged, read back."""
    if hasattr(model, "peft_config"):
        model = copy.deepcopy(model).merge_and_unload()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor.clone() for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_source_equals(source: Source, expected: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and bits, and the same order in `metadata` and `tensors`."""
    metas = [meta for meta in source.metadata() if meta.alias_of is None]
    names = []
    for meta, (name, tensor) in zip(metas, source.tensors(), strict=True):
        names.append(name)
        assert (meta.name, meta.dtype, meta.shape) == (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert_same_bits(tensor, expected[name], name)
    assert sorted(names) == sorted(expected)


def assert_same_bits(tensor: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
    # reshape first: a scalar cannot be viewed as bytes
    assert torch.equal(*(one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, expected))), name


def live_storages(module: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
