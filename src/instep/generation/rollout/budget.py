"""Budgets of a sample: how many tokens it may still have, and how tool output is cut. Pure
functions over counts and token ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from instep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a sample beside `Sampling.max_tokens`.

    max_model_len: tokens of the context: prompt and response together.
    max_turn_tokens: tokens that the model may generate in one turn.
    max_tool_calls: calls of one sample, over all its tools. The model is told when there are none
    left; if it calls again, the sample ends.
    max_tool_output_tokens: tokens of one tool call's output; the rest is left out, and the model is
    told.
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
    """Returns how many tokens still fit after `prompt + response` tokens, into the response's
    budget and the context. Never negative."""
    return max(0, min(max_tokens - response, limits.max_model_len - prompt - response))


def turn_tokens(limits: Limits, room: int) -> int:
    """Returns how many tokens the model may generate in its next turn."""
    return room if limits.max_turn_tokens is None else min(room, limits.max_turn_tokens)


def truncate(token_ids: Sequence[int], room: int) -> tuple[list[int], int]:
    """Returns the first `room` tokens, and how many were cut."""
    kept = list(token_ids[:room])
    return kept, len(token_ids) - len(kept)


def shorten(text: str, chars: int) -> str:
    """Returns `text`, or its first `chars` characters and a note of how many were left out."""
    return text if len(text) <= chars else f"{text[:chars]}\n... ({len(text) - chars} more characters left out)"
