"""Text that nobody wrote: what models and tools say, as tokenizers, records and logs can take it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
MARK = f"instep{secrets.token_hex(8)}"
"""Where a text is cut before it is encoded. ASCII without quotes: chat templates leave it as it is, whatever they escape."""
DEPTH = 64
"""Levels of lists and objects in a call's arguments. What is deeper cannot be copied, printed or sent everywhere."""
SHORT, KEPT = 32, 1024
"""Characters of a text whose tokens are kept, and how many are."""
SHOWN = 10_000
"""Characters of an error's text."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


def clean(text: str) -> str:
    """The text, with U+FFFD in the place of each half of a surrogate pair that stands alone: no encoding has it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def told(error: BaseException) -> str:
    """What an error says, whatever it is."""
    name = type(error).__name__
    try:
        said = clean(str(error))[:SHOWN]
    except Exception:
        said = "it does not say what"
    return f"{name}: {said}" if said else name


def plain(value: Any, depth: int = DEPTH) -> Any:
    """A JSON value with clean texts. Raises `ValueError` for what is nested deeper, and for numbers that JSON has not."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    if isinstance(value, dict | list) and depth == 0:
        raise ValueError(f"lists and objects are nested more than {DEPTH} levels deep")
    if isinstance(value, dict):
        return {clean(str(key)): plain(one, depth - 1) for key, one in value.items()}
    return [plain(one, depth - 1) for one in value] if isinstance(value, list) else value


class Encoder:
    """Encodes text of strangers among text of our own, so that control tokens come of our own alone.

    Control tokens are those that the tokenizer calls special, and what was added to its vocabulary, such as `<tool_call>`, apart from
    words and white space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._control = dict.fromkeys(_declared(tokenizer), True)
        self._all = bool(self._control)
        self._encoded = lru_cache(KEPT)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ())
        """A text with thousands of control tokens has few different pieces."""

    def strange(self, text: str) -> str:
        """A stranger's text, with a `MARK` in the midst of each name of a control token."""
        return MARK.join(self._pieces(clean(text)))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that may hold marks."""
        return [token for piece in clean(text).split(MARK) for token in self._encode(piece)]

    def _pieces(self, text: str) -> list[str]:
        """Pieces of the text none of which has a control token."""
        found = {token for token in self._encode(text) if self.controls(token)}
        if not found:
            return [text]
        if len(text) == 1:
            return [] if text == REPLACEMENT else self._pieces(REPLACEMENT)
        names = {self.tokenizer.decode([token], skip_special_tokens=False) for token in found}
        cuts = {at + 1 for name in names if len(name) > 1 for at in _occurrences(name, text)}
        bounds = [0, *sorted(cuts or {len(text) // 2}), len(text)]
        return [piece for start, end in pairwise(bounds) for piece in self._pieces(text[start:end])]

    def controls(self, token: int) -> bool:
        """Whether it is a control token."""
        if not self._all and token not in self._control:
            shown, hidden = (self.tokenizer.decode([token], skip_special_tokens=skip) for skip in (False, True))
            self._control[token] = shown != hidden
        return self._control.get(token, False)

    def _encode(self, text: str) -> Sequence[int]:
        if len(text) > SHORT:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self._encoded(text)


def _declared(tokenizer: Any) -> set[int]:
    """Control tokens, where the tokenizer says which: not the token for what it does not know, unless that is another too."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    names = ("eos_token_id", "bos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
    if (unknown := getattr(tokenizer, "unk_token_id", None)) not in {getattr(tokenizer, name, None) for name in names}:
        special.discard(unknown)
    if added := getattr(tokenizer, "get_added_vocab", None):
        special |= {token for name, token in added().items() if token != unknown and not _ordinary(name)}
    return special


def _ordinary(name: str) -> bool:
    words = name.replace("▁", " ").split()
    return all(word.isalnum() for word in words)


def _occurrences(name: str, text: str) -> list[int]:
    found, at = [], text.find(name)
    while at >= 0:
        found.append(at)
        at = text.find(name, at + len(name))
    return found
