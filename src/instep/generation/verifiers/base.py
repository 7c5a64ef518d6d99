"""What a verifier is: it says what an answer is worth, given what the prompt's label says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from instep.generation.types import PromptRequest, Sample


@dataclass(frozen=True)
class Answer:
    """What a verifier looks at. `text` is what the model itself said, without special tokens: tool output cannot be taken for an answer."""

    text: str
    sample: Sample
    request: PromptRequest


class Verifier(Protocol):
    """Raising is breaking: the sample then has an error, not a score of 0 that nobody notices.

    One that judges only so many answers at a time has a `turnstile` (`waiting.Turnstile`). An answer waits there for its turn, and
    `RewardConfig.seconds` begin when it has come.
    """

    async def __call__(self, answer: Answer, value: Any, /) -> float:
        """The score of an answer. `value` is the label's."""
