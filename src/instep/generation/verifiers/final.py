"""Finds the final answer in a text, and normalises numbers and units. Each function takes time
linear in the text."""

from __future__ import annotations

import re
import unicodedata

BOXES = ("\\boxed", "\\fbox")
LONGEST = 2000
"""Characters of a final answer. What is longer is none; where nothing marks the answer, it is
looked for in so many at the end."""
MARKERS = ("####", "answer is", "answer:", "answer =")
"""What stands before an answer that nothing else marks, in the wording of GSM8K and its prompts."""


def final(text: str) -> str:
    """Returns the contents of the last `<answer>` or `\\boxed{}`, or the whole text if it has
    neither."""
    answer = marked(text)
    return text.strip() if answer is None else answer


def marked(text: str) -> str | None:
    """Returns the contents of the last `\\boxed{}` within the last `<answer>…</answer>`, else
    those of that tag. Without a tag, the whole text is searched for `\\boxed{}`. None if there
    is neither.

    An `<answer>` that is never closed counts where there is none that is closed.
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end if end >= 0 else None)
    if start >= 0:
        inner = text[start + len("<answer>") : end if end >= 0 else None]
        within = boxed(inner)
        return inner.strip() if within is None else within
    return boxed(text)


def boxed(text: str) -> str | None:
    """Returns the contents of the last `\\boxed{}`: for `\\boxed 5` the next word, for one that
    is never closed the rest."""
    start, name = max((text.rfind(name), name) for name in BOXES)
    if start < 0:
        return None
    text = text[start + len(name) :].lstrip()
    if not text.startswith("{"):
        return text.split(maxsplit=1)[0].rstrip(".,;$") if text else ""
    depth, escaped = 0, False
    for position, letter in enumerate(text):
        if not escaped:
            depth += (letter == "{") - (letter == "}")
        escaped = letter == "\\" and not escaped
        if depth == 0:
            return text[1:position].strip()
    return text[1:].strip()


def announced(text: str) -> str | None:
    """Returns the text after the last `####` or `answer is`; None if there is neither."""
    lower = text.lower()
    start, marker = max((lower.rfind(marker), marker) for marker in MARKERS)
    if start < 0 or len(lower) != len(text):
        return None
    return text[start + len(marker) :].strip()


SIGNS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\uff0d\ufe63", "-"), **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u3000", " "),
    "\u200b": "", "×": "\\times ", "÷": "/", "\u2044": "/", "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt", "≈": "=",
    "·": "\\cdot ", "⋅": "\\cdot ", "±": "\\pm ", "°": "^\\circ",
}  # fmt: skip
LATEX = {
    "{,}": ",", "\\!": "", "\\$": "$", "\\%": "%", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\left": "",
    "\\right": "", "\\displaystyle": "", "^{\\circ}": "^\\circ", "\\degree": "^\\circ", "\\approx": "=", "\\;": " ", "\\:": " ", "~": " ",
    "\\ ": " ", "\\thinspace": "\\,",
}  # fmt: skip
BETWEEN_DIGITS = re.compile(r"(?<=\d)\s*+\\,\s*+(?=\d{3}(?!\d))")
SPACED = re.compile(r"(?<![\d.,])\d{1,3}+(?: \d{3})++(?![\d./])")
MIXED = re.compile(r"(?<![\d./])(\d++)\s++(\d++)\s*+/\s*+(\d++)(?![\d./])")


def normal(text: str) -> str:
    """Returns the text with one spelling of signs, digits, spaces and thousands. Other LaTeX
    stays."""
    if not text.isascii():
        text = "".join(SIGNS[letter] if letter in SIGNS else _plain(letter) for letter in text)
    for written, meant in LATEX.items():
        text = text.replace(written, meant)
    text = BETWEEN_DIGITS.sub("", text).replace("\\,", " ")
    text = SPACED.sub(lambda found: found[0].replace(" ", ""), text)
    return MIXED.sub(r"\1\\frac{\2}{\3}", text)


def _plain(letter: str) -> str:
    if letter.isascii():
        return letter
    digit = unicodedata.decimal(letter, None)
    if digit is not None:
        return str(digit)
    power = unicodedata.digit(letter, None)
    kind = unicodedata.decomposition(letter)
    if power is not None and kind.startswith("<super>"):
        return f"^{power}"
    if kind.startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", letter).replace("⁄", "/")
    return unicodedata.normalize("NFKC", letter) if kind.startswith("<wide>") else letter
