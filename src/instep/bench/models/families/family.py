"""The parts of a family, and the sizes that most families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 160


@dataclass(frozen=True)
class Pictures:
    """The parts that an engine needs beside the weights to answer a prompt with an image.

    words: the tokenizer's special tokens, by the name of its attribute: (token id, word).
    prompt: the token ids that stand for one image in a prompt.
    processor, image_processor, video_processor: classes of transformers, by name. settings, image,
    video: their arguments; images become small, as tokens and seconds grow with their area.
    """

    words: Mapping[str, tuple[int, str]]
    prompt: tuple[int, ...]
    processor: str
    image_processor: str
    image: Mapping[str, Any] = field(default_factory=dict)
    video_processor: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A configuration class of transformers, by name, and its settings."""

    config: str
    settings: Mapping[str, Any]
    pictures: Pictures | None = None


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
HEADS = SIZES | {"head_dim": 64}
"""The same, for configurations whose heads would be of another size."""

TIED = {"tie_word_embeddings": True}
WINDOW = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
"""One layer looks back 32 tokens, the other at all."""
