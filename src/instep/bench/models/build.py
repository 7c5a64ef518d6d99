"""Makes tiny models of a family with random weights, and checkpoints that an engine can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from instep.bench.models.families import FAMILIES
from instep.bench.models.families.family import VOCABULARY, Pictures

SCALE = 0.1
"""Standard deviation of matrices, and of what is added to the first values of vectors: large enough
for greedy tokens to depend on all of them."""


def model(name: str, seed: int) -> Any:
    """Returns a model of transformers in bfloat16 on the CPU. Equal seeds give equal weights.

    Raises what transformers raises where this version does not know the family.
    """
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    torch.manual_seed(seed)
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.settings)
    auto = transformers.AutoModelForImageTextToText if family.pictures else transformers.AutoModelForCausalLM
    made = auto.from_config(config, dtype=torch.bfloat16).to(torch.bfloat16).eval()
    # As of a published checkpoint that was loaded: its names, which are those that engines know.
    made._weight_conversions = get_model_conversion_mapping(made, add_legacy=False)
    saved = made.state_dict(keep_vars=True)
    tensors = {id(tensor): tensor for tensor in saved.values() if tensor.is_floating_point()}
    with torch.no_grad():
        for tensor in tensors.values():  # each once, tied ones too
            noise = SCALE * torch.randn(tensor.shape)
            tensor.copy_(noise if tensor.ndim > 1 else tensor + noise)
    return made


def save(made: Any, name: str, folder: Path) -> Path:
    """Writes the model into `folder`, with the processor that an engine needs for images."""
    made.save_pretrained(folder)
    if pictures := FAMILIES[name].pictures:
        _prepare(pictures, folder)
    return folder


def _prepare(pictures: Pictures, folder: Path) -> None:
    import transformers

    tokenizer = _tokenizer(pictures)
    parts = {"image_processor": getattr(transformers, pictures.image_processor)(**pictures.image)}
    if pictures.video_processor:
        parts["video_processor"] = getattr(transformers, pictures.video_processor)()
    processor = getattr(transformers, pictures.processor)
    processor(tokenizer=tokenizer, **parts, **pictures.settings).save_pretrained(folder)


def _tokenizer(pictures: Pictures) -> Any:
    """Returns a tokenizer with the text "t7" for token 7, and the special tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{token}": token for token in range(VOCABULARY)}
    for token, word in pictures.words.values():
        del vocabulary[f"t{token}"]
        vocabulary[word] = token
    words = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {attribute: word for attribute, (_, word) in pictures.words.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="t0",
        eos_token="t1",
        pad_token="t2",
        unk_token="t3",
        extra_special_tokens=special,
    )
