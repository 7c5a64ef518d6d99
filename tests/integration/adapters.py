"""PEFT models for the tests."""

from __future__ import annotations

from typing import Any

import torch
from models import tiny


def with_adapter(base: Any = None, **config: Any) -> Any:
    """A model with a LoRA adapter that changes every linear layer, unless the arguments say otherwise. The base is the Llama of seed 2."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False, **config}
    return get_peft_model(base or tiny("llama", 2), LoraConfig(**settings))


def retrain(model: Any, seed: int) -> None:
    """Other values for the adapter, of the size that it began with."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn_like(param) * 0.1)
