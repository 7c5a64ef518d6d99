"""The tokens of a sample so far, the model's and the tools', with log-probabilities, mask and
versions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from instep.errors import GenerationError
from instep.generation.types import Completion, RequestId, VersionSpan

ROUNDING = 1e-3
"""A log-probability may exceed 0 by this much: engines compute in half precision."""


class Transcript:
    """A sample's tokens. It grows by whole turns. Invariant: the three lists have the same
    length, and the spans partition the tokens whose mask is 1."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[int] = []
        self.versions: list[VersionSpan] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def generated(self) -> int:
        """How many tokens the model has generated."""
        return sum(self.mask)

    def add_turn(self, completion: Completion) -> None:
        """Appends the model's tokens, exactly those that the engine sampled."""
        offset, count = len(self), len(completion.token_ids)
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.mask += [1] * count
        for span in completion.versions:
            self._add_span(span.version, offset + span.start, offset + span.end)

    def add_tool_output(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.mask += [0] * len(token_ids)

    def _add_span(self, version: str, start: int, end: int) -> None:
        last = self.versions[-1] if self.versions else None
        if start == end:
            return
        if last and last.version == version and last.end == start:
            self.versions[-1] = VersionSpan(version, last.start, end)
        else:
            self.versions.append(VersionSpan(version, start, end))


def check(completion: Completion, budget: int, id: RequestId, turn: int) -> None:
    """Raises `GenerationError` for an engine's answer that cannot be trained on. Such an answer
    is never repaired."""
    tokens = len(completion.token_ids)
    if wrong := _fault(completion, tokens, budget):
        raise GenerationError(f"sample {id}, turn {turn}: the engine's answer of {tokens} tokens {wrong}")


def _fault(completion: Completion, tokens: int, budget: int) -> str | None:
    if len(completion.logprobs) != tokens:
        return f"has {len(completion.logprobs)} log-probabilities"
    if tokens > budget:
        return f"exceeds the {budget} that were asked for"
    for position, logprob in enumerate(completion.logprobs):
        if not -math.inf < logprob <= ROUNDING:  # false for NaN too
            return f"has the log-probability {logprob} at position {position}"
    end = 0
    for span in completion.versions:
        if span.start != end or span.end < span.start:
            break
        end = span.end
    if end != tokens or any(span.end > tokens for span in completion.versions):
        return f"has version spans that do not partition it: {[(span.version, span.start, span.end) for span in completion.versions]}"
    return None
