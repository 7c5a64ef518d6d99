"""Judges answers as text: by an exact match, by words in common, or by their format."""

from __future__ import annotations

import asyncio
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from instep.errors import ConfigError
from instep.extras import needed_by
from instep.generation.verifiers.base import Answer, reading
from instep.generation.verifiers.final import announced, final, marked
from instep.generation.verifiers.number import WRAPPED
from instep.generation.waiting import Turnstile

ARTICLES = frozenset(("a", "an", "the"))
QUOTES = dict.fromkeys(map(ord, "\u2018\u2019\u201b`\u00b4"), "'") | dict.fromkeys(map(ord, "\u201c\u201d\u201e\u00ab\u00bb"), '"')
MARKS, JOINER = 30, "\u034f"
"""How many combining marks may follow one another, and what parts more: Unicode's Stream-Safe Text
Format (UAX #15)."""
SAYING_NOTHING = re.compile(r"[.,;:!?\"'()\[\]{}*_\u2026$\u3001\u3002\u300a-\u300f-]")
"""Marks that say nothing, unless they stand between digits, before one, or as a sign."""
MOST = 50_000
"""Characters of an answer that words are compared of. Unicode has letters that stand for
eighteen."""
BETWEEN = re.compile(r"</think>\s*+<answer>")


@dataclass(frozen=True)
class Format:
    """Whether the whole text has R1's format: thoughts, then an answer, each in its tags.

    pattern: a regular expression that the whole text must match instead. A text with which it takes
    longer than `seconds` does not. Raises `ConfigError` for a pattern that is none.
    """

    pattern: str | None = None
    seconds: float = 5.0
    turnstile: Turnstile = field(default_factory=lambda: Turnstile(os.cpu_count() or 1), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pattern is not None:
            with needed_by("Format(pattern)"):
                import regex
            try:
                regex.compile(self.pattern, regex.DOTALL)
            except regex.error as error:
                raise ConfigError(f"{self.pattern!r} is no regular expression: {error}") from error

    @property
    def own_seconds(self) -> float:
        return self.seconds

    async def __call__(self, answer: Answer, value: Any = None) -> float:  # noqa: ARG002
        if self.pattern is None:
            return float(await reading(_thinks_then_answers, answer.text.strip()))
        return float(await asyncio.to_thread(self._matches, answer.text))

    def _matches(self, text: str) -> bool:
        import regex

        # It looks at the clock while it searches, and lets other threads work: `re` does neither.
        match = partial(regex.fullmatch, self.pattern, text, regex.DOTALL, timeout=self.seconds, concurrent=True)
        try:
            return match() is not None
        except TimeoutError:
            return False


def _thinks_then_answers(text: str) -> bool:
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return False
    return BETWEEN.search(text, len("<think>"), len(text) - len("</answer>")) is not None


@dataclass(frozen=True)
class ExactMatch:
    """Whether the final answer is one of the label's texts, apart from case, articles, quotes and
    punctuation that says nothing.

    The final answer is what stands in the last `<answer>` or `\\boxed{}`, else the whole text, or
    what follows the last `the answer is`. Signs and points of numbers count, as do `+`, `#` and the
    like. An empty answer matches nothing, nor does one of more than 50,000 characters that is more
    than twice as long as each of the label's.
    """

    async def __call__(self, answer: Answer, value: str | Sequence[str]) -> float:
        accepted = [value] if isinstance(value, str) else list(value)
        return float(await reading(_matches, answer.text, accepted))


@dataclass(frozen=True)
class WordOverlap:
    """The F1 score of the words that the final answer shares with the label, as in SQuAD. With
    several labels, the best score counts.

    Of a longer answer the first 50,000 characters count.
    """

    async def __call__(self, answer: Answer, value: str | Sequence[str]) -> float:
        accepted = [value] if isinstance(value, str) else list(value)
        return await reading(_overlap, final(answer.text)[:MOST], accepted)


def _matches(text: str, accepted: Sequence[str]) -> bool:
    shown = [final(text)] if marked(text) is not None else [text, announced(text) or ""]
    longest = max(MOST, *(2 * len(one) for one in accepted))
    answers = {plain_words(one) for one in shown if len(one) <= longest} - {""}
    return not answers.isdisjoint(plain_words(one) for one in accepted)


def _overlap(text: str, accepted: Sequence[str]) -> float:
    mine = Counter(plain_words(text).split())
    best = 0.0
    for one in accepted:
        theirs = Counter(plain_words(one).split())
        if common := (mine & theirs).total():
            best = max(best, 2 * common / (mine.total() + theirs.total()))
    return best


def plain_words(text: str) -> str:
    """Returns a text's words in a normal form for comparison. The result is only empty if the
    text is."""
    text = unicodedata.normalize("NFKC", _parted(text.translate(QUOTES))).casefold().replace("\u2212", "-")
    text = unicodedata.normalize("NFC", _parted(WRAPPED.sub(r"\1", text).replace("\\(", "").replace("\\)", "")))
    words = SAYING_NOTHING.sub(_kept, text).split()
    said = [word for word in words if word not in ARTICLES] or words
    return " ".join(said) or " ".join(text.split())


def _kept(found: re.Match[str]) -> str:
    """Returns what replaces a punctuation mark, which means something in few places."""
    letter, text, at = found[0], found.string, found.start()
    before, after = text[at - 1 : at], text[at + 1 : at + 2]
    if letter == "-":
        return " " if before.isalpha() and after.isalpha() else letter
    # 3.14, 1,000, 3:45, .5
    return letter if after.isdigit() and letter in ".,:" and (before.isdigit() or letter == ".") else ""


def _parted(text: str) -> str:
    """Breaks long runs of combining marks: `normalize` sorts a run in time that grows with the
    square of its length."""
    if text.isascii():
        return text
    kept, run = [], 0
    for letter in text:
        marks = 0 if letter.isascii() else _marks(letter)
        run = run + marks if marks else 0
        if run > MARKS:
            kept.append(JOINER)
            run = marks
        kept.append(letter)
    return "".join(kept)


@lru_cache(1 << 12)
def _marks(letter: str) -> int:
    """Returns how many combining marks a letter consists of; 0 if it has any other part."""
    parts = unicodedata.normalize("NFKD", letter)
    return len(parts) if all(map(unicodedata.combining, parts)) else 0
