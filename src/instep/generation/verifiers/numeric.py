"""Judges answers by comparing numbers."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib.util import find_spec

from instep.generation.verifiers import number
from instep.generation.verifiers.base import Answer, reading
from instep.generation.verifiers.final import LONGEST, announced, final, marked
from instep.generation.verifiers.maths import shared
from instep.generation.verifiers.number import Number
from instep.generation.waiting import Turnstile


@dataclass(frozen=True)
class Numeric:
    """Whether the final answer is the label's number, exactly or within `tolerance` of its size.

    The final answer is what stands in the last `<answer>` or `\\boxed{}`, else behind the last
    `####` or `the answer is`, else the last number of the text. Units, currencies and commas
    between thousands are no part of the number; `50%` is 50 and 0.5. What is more than a numeral,
    such as `2^{10}`, is computed by math-verify.
    """

    tolerance: float = 0.0

    @property
    def turnstile(self) -> Turnstile | None:
        return shared().turnstile if _computes() else None

    @property
    def own_seconds(self) -> float | None:
        return shared().own_seconds if _computes() else None

    async def __call__(self, answer: Answer, value: str | float) -> float:
        label = str(value)
        found = await reading(read, answer.text)
        wanted = number.number(label) or (number.number(announced(label) or "") if "####" in label else None)
        if wanted is None and not _computable(label):
            raise ValueError(f"the label {value!r} holds no number")
        if final(answer.text) == label.strip():
            return 1.0
        if found is None or (isinstance(found, Number) and wanted):
            return float(found is not None and wanted is not None and found.equals(wanted, self.tolerance))
        shown = found if isinstance(found, str) else str(found.value)
        if not _computable(shown):
            return 0.0
        return await shared().compare(label, shown, self.tolerance)


@cache
def _computes() -> bool:
    """Whether math-verify is installed. Looking for it takes longer than judging an answer."""
    return find_spec("math_verify") is not None


def last_number(text: str) -> Fraction | None:
    """Returns the last number in a text: `1,234.5`, `-3/4`, `6e-3`. None if there is none."""
    found = number.last(number.plain(text))
    return None if found is None else found.value


def read(text: str) -> Number | str | None:
    """Returns the number that a text ends in, or the expression that must be computed for it.
    None if there is neither."""
    shown = marked(text)
    if shown is not None and len(shown) > LONGEST:
        return None
    if shown is not None:
        return number.number(shown) or _only(shown) or (f"\\boxed{{{shown}}}" if _computable(shown) else None)
    text = text.strip()
    part = (announced(text) or "")[:LONGEST]
    if part:
        line = part.split("\n", 1)[0]
        return number.number(line) or (line if _is_maths(line) else number.first(number.plain(part)))
    text = text[-LONGEST:]
    plain = number.plain(text)
    whole = number.whole(plain)
    if whole is not None:
        return whole
    words = _with_digits(plain)
    return text if words and _is_maths(words[-1]) else number.last(plain)


def _only(text: str) -> Number | None:
    """Returns the number of a sentence that has only one, else None."""
    plain = number.plain(text)
    if _is_maths(plain) or not all(map(number.number, _with_digits(plain))):  # as `5x` is none
        return None
    one = number.first(plain)
    return one if one == number.last(plain) else None


def _with_digits(text: str) -> list[str]:
    """Returns the words of a text that contain a digit."""
    return [word for word in text.split() if not word.isalpha() and any(map(str.isdigit, word))]


def _is_maths(text: str) -> bool:
    return any(mark in text for mark in ("\\", "^", "_", "{"))


def _computable(text: str) -> bool:
    return any(letter.isdigit() for letter in text) or "\\" in text
