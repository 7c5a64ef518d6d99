"""The interface of a verifier, which judges an answer against the prompt's label."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from instep.generation.types import PromptRequest, Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """The answer that a verifier judges. `text` holds only the model's own words, without
    special tokens: tool output cannot be taken for an answer."""

    text: str
    sample: Sample
    request: PromptRequest


SHORT = 4000
"""Characters of a text that any verifier reads in a few milliseconds."""


async def reading(function: Callable[..., T], text: str, *arguments: Any) -> T:
    """Returns `function(text, *arguments)`. A long text is read in a thread, so that other
    verifiers go on."""
    if len(text) <= SHORT:
        return function(text, *arguments)
    return await asyncio.to_thread(function, text, *arguments)


class Verifier(Protocol):
    """Judges one answer. If it raises, it counts as broken: the sample then has an error, not a
    score of 0 that nobody notices.

    One that judges only so many answers at a time has a `turnstile` (`waiting.Turnstile`). An
    answer waits there for its turn, and `RewardConfig.seconds` begin when it has come.

    One that ends its work by itself, and then gives a score, has `own_seconds`, the time that it
    gives an answer. It counts them from the start of the work, and they take the place of
    `RewardConfig.seconds`.
    """

    async def __call__(self, answer: Answer, value: Any, /) -> float:
        """Returns the score of an answer. `value` is the label's."""
