"""Answers compared as numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from instep.generation.verifiers.base import Answer
from instep.generation.verifiers.text import final


@dataclass(frozen=True)
class Numeric:
    """Whether the last number of the final answer is the label's, exactly or within `tolerance` of its size."""

    tolerance: float = 0.0

    async def __call__(self, answer: Answer, value: str | float) -> float:
        expected = last_number(str(value))
        if expected is None:
            raise ValueError(f"the label {value!r} holds no number")
        found = last_number(final(answer.text))
        return float(found is not None and abs(found - expected) <= abs(expected) * Fraction(self.tolerance))


NUMBER = re.compile(
    r"((?:(?<![\w)])-)?(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:e[+-]?\d{1,3}(?!\d))?)(?:\s*/\s*([1-9]\d*))?",
    re.IGNORECASE,
)
DIGITS = 100
"""What is longer is no answer, and slow to compute with."""


def last_number(text: str) -> Fraction | None:
    """The last number in a text: `1,234.5`, `-3/4`, `6e-3`."""
    found = NUMBER.findall(text)
    if not found or max(map(len, found[-1])) > DIGITS:
        return None
    number, divisor = found[-1]
    return Fraction(number.replace(",", "")) / Fraction(divisor or 1)
