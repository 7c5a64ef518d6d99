"""Parses numbers as people write them: `-$1,234.50`, `5 1/2`, `25 m^2`, `1.5 \\times 10^3`,
`50%`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from instep.generation.verifiers.final import normal

DIGITS = 1000
"""What is longer is no answer, and slow to compute with."""
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
UNITS = set("mgshlLKCFNJWVA")
"""Units of one letter. Others are variables: `5x` is not 5."""

# Quantifiers are possessive (`++`): nothing is tried twice, so time is linear in the text.
WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|rm|bf)\s*+\{([^{}]*+)\}")
FRACTION = re.compile(r"\\frac\s*+(?:\{\s*+(-?+\d++(?:\.\d++)?+)\s*+\}\s*+\{\s*+(\d++)\s*+\}|(\d)(\d)(?!\d))")
POWER = re.compile(r"(?<=[\d.])\s*+(?:\\times|\\cdot|\*|[xX])\s*+10\s*+\^\s*+(?:\{\s*+([+-]?+\d{1,3}+)\s*+\}|([+-]?+\d{1,3}+))(?!\d)")
NUMBER = re.compile(
    r"([+-]?+)\s*+(\\?+[$€£¥₹]?+)\s*+([+-]?+)\s*+"
    r"(\d++(?:,\d{3})*+(?:\.\d++)?+|\.\d++)\.?+(?:[eE]([+-]?+\d{1,3}+)(?!\w))?+"
    r"(?:\s*+/\s*+(\d++)|\s++(\d++)\s*+/\s*+(\d++))?+"
)
FOUND = re.compile(r"(?<![\d^])(?<!\^\{)(?<!\^-)(?:\d++(?:,\d{3}(?!\d))*+(?:\.\d++)?+|(?<![\d.])\.\d++)(?:[eE][+-]?+\d{1,3}+(?!\w))?+")
POWERED = re.compile(r"(?<=[A-Za-z)}\]])\^(?:-?+\d++|\{-?+\d++\})|\^\\circ")


class Number(NamedTuple):
    value: Fraction
    percent: bool = False

    def equals(self, other: Number, tolerance: float = 0.0) -> bool:
        """Whether two numbers are equal, or differ by at most `tolerance` of the other's size.
        `50%` equals 50 and 0.5, as labels have either."""
        mine = [self.value] if not self.percent or other.percent else [self.value, self.value / 100]
        theirs = [other.value] if not other.percent or self.percent else [other.value, other.value / 100]
        if not tolerance:
            return any(one == two for one in mine for two in theirs)
        return any(abs(one - two) <= abs(two) * Fraction(tolerance) for one in mine for two in theirs)


def number(text: str) -> Number | None:
    """Returns the number that an answer is, with a unit or without. None if the text is no
    number, or has more in it."""
    return whole(plain(text))


def whole(text: str) -> Number | None:
    """Does what `number` does, for a text that `plain` has returned."""
    text = text.rpartition("=")[2].strip() if "=" in text and "\\" not in text.rpartition("=")[2] else text
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    found = NUMBER.match(text)
    if found is None:
        return None
    value = _value(found)
    rest = text[found.end() :].strip().rstrip(".,;:!").strip()
    if value is None or rest[:1].isdigit() or rest[:1] == ",":
        return None
    word = rest.lower()
    if (scale := SCALES.get(word.split(" ")[0] if word else "")) is not None:
        word = word.partition(" ")[2]
        value *= 10**scale
    if word.startswith(("%", "percent")):
        return Number(value, True) if _is_unit(word.removeprefix("%").removeprefix("percent").strip()) else None
    return Number(value) if _is_unit(rest) else None


def plain(text: str) -> str:
    """Returns a text without markup. Fractions and powers of ten are written as `3/4` and
    `1.5e3`."""
    text = WRAPPED.sub(r" \1 ", normal(text)).replace("**", " ").replace("`", " ").replace(" ^", "^")
    text = FRACTION.sub(lambda found: f" {found[1] or found[3]}/{found[2] or found[4]}", text)
    text = POWER.sub(lambda found: f"e{found[1] or found[2]}", text)
    for mark in ("\\(", "\\)", "\\[", "\\]", "$$"):
        text = text.replace(mark, " ")
    text = text.strip()
    if text.startswith("$") and text.endswith("$") and len(text) > 1:
        text = text[1:-1].strip()
    return text.rstrip(".,;:!").strip()


def last(text: str) -> Number | None:
    """Returns the last number of a `plain` text. The exponent of a unit, as in `cm^2`, does not
    count."""
    return _pick(text, -1)


def first(text: str) -> Number | None:
    """Returns the first number of a `plain` text."""
    return _pick(text, 0)


def _pick(text: str, which: int) -> Number | None:
    text = POWERED.sub(" ", text)
    spans = [found.span() for found in FOUND.finditer(text)]
    if not spans:
        return None
    start, end = _with_fraction(text, spans, which % len(spans))
    before = text[:start].rstrip("$€£¥₹ ") if text[:start].rstrip(" ")[-1:] in "$€£¥₹" else text[:start]
    signed = before.endswith("-") and not (before[-2:-1].isalnum() or (before[-2:-1] in ")]}" and before[-2:-1]))
    spaced = before.strip() == "-"
    found = NUMBER.match(("-" if signed or spaced else "") + text[start:end])
    value = _value(found) if found else None
    return None if value is None else Number(value, text[end:].lstrip().startswith("%"))


def _with_fraction(text: str, spans: list[tuple[int, int]], at: int) -> tuple[int, int]:
    """Returns the span of a number, or of the fraction such as `3/4` or `5 1/2` that it is a
    part of."""
    low = high = at
    if low > 0 and text[spans[low - 1][1] : spans[low][0]].strip() == "/":
        low -= 1
    if low == at and high + 1 < len(spans) and text[spans[high][1] : spans[high + 1][0]].strip() == "/":
        high += 1
    if high > low and low > 0 and text[spans[low - 1][1] : spans[low][0]].isspace() and text[slice(*spans[low - 1])].isdigit():
        low -= 1
    return spans[low][0], spans[high][1]


def _value(found: re.Match[str]) -> Fraction | None:
    sign, _, inner, digits, power, divisor, top, bottom = found.groups()
    if max(len(part or "") for part in found.groups()) > DIGITS or (sign and inner):
        return None
    if "," in digits and len(digits.partition(",")[0]) > 3:
        return None
    if not int(divisor or 1) or not int(bottom or 1):
        return None
    digits = digits.replace(",", "")
    value = Fraction(int(digits) if digits.isdecimal() else digits)
    if power:
        value *= Fraction(10) ** int(power)
    if divisor:
        value /= int(divisor)
    if bottom:
        value += Fraction(int(top), int(bottom))
    return -value if "-" in (sign, inner) else value


def _is_unit(text: str) -> bool:
    """Whether this text after a number is a unit, and does not change the number."""
    text = POWERED.sub("", text.replace("^\\circ", "°")).strip()
    if any(letter.isdigit() or letter in "\\=<>+*^_{}[]|" for letter in text):
        return False
    words = text.replace("/", " ").replace("(", " ").replace(")", " ").replace("°", " ").split()
    return all(len(word) > 1 or word in UNITS or not word.isalnum() for word in words) and not {"or", "and", "to"} & set(words)
