"""Makes text of models and tools safe for tokenizers, records and logs."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
MARK = f"instep{secrets.token_hex(8)}"
"""Where a text is cut before it is encoded. ASCII without quotes: chat templates leave it as it is,
whatever they escape."""
DEPTH = 64
"""Levels of lists and objects in a call's arguments. What is deeper cannot be copied, printed or
sent everywhere."""
SHORT, KEPT = 32, 1024
"""Characters of a text whose tokens are kept, and how many are."""
SHOWN = 10_000
"""Characters of an error's text."""


class Tokenizer(Protocol):
    """The methods that a tokenizer must have. Those of transformers have them."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


def clean(text: str) -> str:
    """Returns the text with each lone surrogate replaced by U+FFFD: no encoding takes one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def told(error: BaseException) -> str:
    """Returns an error's type and text, even if its own `str` fails."""
    name = type(error).__name__
    try:
        said = clean(str(error))[:SHOWN]
    except Exception:
        said = "it does not say what"
    return f"{name}: {said}" if said else name


def plain(value: Any, depth: int = DEPTH) -> Any:
    """Returns a JSON value with clean texts. Raises `ValueError` for a value that is nested too
    deep, and for a number that JSON does not have."""
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
    """Encodes foreign text within our own, so that control tokens come from our own text alone.

    Control tokens are those that the tokenizer calls special, and what was added to its vocabulary,
    such as `<tool_call>`, apart from words and white space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._control = dict.fromkeys(_declared(tokenizer), True)
        self._all = bool(self._control)
        self._encoded = lru_cache(KEPT)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ())
        """A text with thousands of control tokens has few different pieces."""

    def strange(self, text: str) -> str:
        """Returns a foreign text with a `MARK` inside each name of a control token."""
        return MARK.join(self._pieces(clean(text)))

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, which may hold marks."""
        return [token for piece in clean(text).split(MARK) for token in self._encode(piece)]

    def _pieces(self, text: str) -> list[str]:
        """Cuts the text into pieces that have no control tokens."""
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
        """Whether a token is a control token."""
        if not self._all and token not in self._control:
            shown, hidden = (self.tokenizer.decode([token], skip_special_tokens=skip) for skip in (False, True))
            self._control[token] = shown != hidden
        return self._control.get(token, False)

    def _encode(self, text: str) -> Sequence[int]:
        if len(text) > SHORT:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self._encoded(text)


def _declared(tokenizer: Any) -> set[int]:
    """Returns the control tokens that the tokenizer names. The unknown token is none, unless it
    has another role too."""
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
