"""Tiny models of three families, with weights large enough for greedy tokens to depend on all of them. No two dimensions are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PROMPTS = [[1, 2, 3, 4, 5], list(range(7, 47)), [9, 8, 7, 6, 5, 4, 3, 2, 1]]


def tiny(family: str, seed: int, **changes: int) -> Any:
    """A random causal language model: "qwen3" (tied head), "llama" (untied) or "qwen3_moe". changes: to its sizes."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    shared = {
        "vocab_size": 150, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "initializer_range": 0.2,
        **changes,
    }  # fmt: skip
    configs = {
        "qwen3": lambda: Qwen3Config(**shared, tie_word_embeddings=True),
        "llama": lambda: LlamaConfig(**shared, tie_word_embeddings=False),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **{"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, **shared},
            decoder_sparse_step=1,
            tie_word_embeddings=False,
        ),
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(configs[family](), dtype=torch.bfloat16)


def add_tokenizer(folder: Path) -> Path:
    """Gives a model's directory words for its tokens, "t7" for 7, and chats that are all that was said."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{token}": token for token in range(150)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t149")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
