"""Named shapes of models, with random weights: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from instep.errors import ConfigError
from instep.extras import needed_by

ShapesName = Literal["tiny", "smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3-8b", "qwen3-moe", "llama-70b/tp8"]

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": QWEN3 | {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    },
    "smollm2-135m": LLAMA | {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    # Those of Qwen3-30B-A3B: 128 experts in each layer.
    "qwen3-moe": QWEN3 | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
    # What each of eight tensor-parallel workers holds of Llama 70B, as a model of its own.
    "llama-70b/tp8": LLAMA | {
        "vocab_size": 128256 // 8, "hidden_size": 8192, "intermediate_size": 28672 // 8, "num_hidden_layers": 80,
        "num_attention_heads": 64 // 8, "num_key_value_heads": 8 // 8, "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip


def check(name: str) -> str:
    """Returns the name. Raises `ConfigError` for a name that is not in the list."""
    if name not in SHAPES:
        raise ConfigError(f"there are no shapes named {name!r}", next_step=f"one of {', '.join(get_args(ShapesName))}")
    return name


def config(name: str) -> Any:
    """Returns the configuration of transformers."""
    with needed_by("the benchmark"):
        from transformers import AutoConfig

    return AutoConfig.for_model(**SHAPES[check(name)], max_position_embeddings=1024, dtype="bfloat16")


def folder(name: str, path: Path) -> Path:
    """Makes `path` a checkpoint directory with a configuration and without weights."""
    config(name).save_pretrained(path)
    return path


def model(name: str, seed: int, device: str) -> Any:
    """Returns a model of transformers in bfloat16. Its random weights are large enough for
    greedy tokens to depend on them."""
    import torch

    with needed_by("the benchmark"):
        from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config(name), dtype=torch.bfloat16)
    with torch.no_grad():
        for param in made.parameters():
            if param.ndim > 1:
                param.normal_(0.0, 0.08 if name == "tiny" else 0.02)
            else:
                param.normal_(1.0, 0.05)
    return made.eval()
