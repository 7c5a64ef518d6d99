"""Answers compared as text: the final answer, an exact match, a format."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instep.generation.verifiers.base import Answer


@dataclass(frozen=True)
class Format:
    """Whether the whole text matches a regular expression. By default: thoughts, then an answer, in R1's tags."""

    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"

    async def __call__(self, answer: Answer, value: Any = None) -> float:  # noqa: ARG002
        return float(re.fullmatch(self.pattern, answer.text, re.DOTALL) is not None)


@dataclass(frozen=True)
class ExactMatch:
    """Whether the final answer is one of the label's, apart from case, articles, punctuation and white space.

    The final answer is what stands in the last `<answer>` or `\\boxed{}`, else the whole text.
    """

    async def __call__(self, answer: Answer, value: str | Sequence[str]) -> float:
        accepted = [value] if isinstance(value, str) else list(value)
        return float(_plain(final(answer.text)) in {_plain(text) for text in accepted})


def final(text: str) -> str:
    """What stands in the last `<answer>` or else in the last `\\boxed{}`; the whole text where there is neither."""
    start = text.rfind("<answer>")
    if start >= 0:
        text = text[start + len("<answer>") :].partition("</answer>")[0]
    boxed = text.rfind("\\boxed{")
    if boxed < 0:
        return text.strip()
    depth, start = 0, boxed + len("\\boxed")
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position].strip()
    return text[start + 1 :].strip()


def _plain(text: str) -> str:
    words = text.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))
