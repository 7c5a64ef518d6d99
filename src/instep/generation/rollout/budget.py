"""How much a sample may still say, and what becomes of tool output that does not fit. Pure functions over counts and token ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from instep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a sample, beside `Sampling.max_tokens`.

    max_model_len: tokens of the context: prompt and response together.
    max_turn_tokens: tokens that the model may generate in one turn.
    max_tool_calls: calls of one sample, over all its tools. The model is told when there are none left; if it calls again, the sample ends.
    max_tool_output_tokens: tokens of one tool call's output; the rest is left out, and the model is told.
    max_tool_output_chars: the same in characters, applied before anything is tokenised.
    tool_timeout: seconds for one tool call.
    sample_timeout: seconds for a whole sample, which then ends as aborted.
    """

    max_model_len: int
    max_turn_tokens: int | None = None
    max_tool_calls: int = 5
    max_tool_output_tokens: int | None = None
    max_tool_output_chars: int = 65536
    tool_timeout: float = 60.0
    sample_timeout: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_turn_tokens", "max_tool_output_tokens", "max_tool_output_chars"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_tool_calls < 0:
            raise ConfigError(f"max_tool_calls must not be negative, not {self.max_tool_calls}")
        for name in ("tool_timeout", "sample_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")


def room(limits: Limits, max_tokens: int, prompt: int, response: int) -> int:
    """Tokens that still fit behind `prompt + response` tokens, into the response's budget and into the context. Never negative."""
    return max(0, min(max_tokens - response, limits.max_model_len - prompt - response))


def turn_tokens(limits: Limits, room: int) -> int:
    """Tokens that the model may generate in its next turn."""
    return room if limits.max_turn_tokens is None else min(room, limits.max_turn_tokens)


def truncate(token_ids: Sequence[int], room: int) -> tuple[list[int], int]:
    """The first `room` tokens, and how many were cut."""
    kept = list(token_ids[:room])
    return kept, len(token_ids) - len(kept)


def shorten(text: str, chars: int) -> str:
    """The beginning of `text` and a note of how much was left out, where it is longer than `chars`."""
    return text if len(text) <= chars else f"{text[:chars]}\n... ({len(text) - chars} more characters left out)"
