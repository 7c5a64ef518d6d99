"""Scores samples with named verifiers. Their scores are weighted and added up to one number, and
kept as its parts."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any, Literal

from msgspec import structs

from instep.errors import ConfigError
from instep.generation.text import Tokenizer, told
from instep.generation.types import GenerationResult, Label, PromptRequest, Reward, RewardPart, Sample
from instep.generation.verifiers import Answer, Format, Verifier
from instep.generation.waiting import bounded, is_for_us

logger = logging.getLogger(__name__)

RewardFunction = Callable[[GenerationResult], Coroutine[Any, Any, GenerationResult]]
ENDED_WELL = ("stop", "done")
BESIDE = 60.0
"""Seconds that a verifier may take beside its own limit, to start processes and to end them; one
that takes longer is broken."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Settings for scoring samples. `build` makes a function of them.

    A score is the sum of what its verifiers give, each times its label's weight, times
    `verification_reward`. Then:

    format_reward: added where the text matches `format`. format_required: without the format,
    verifiers count nothing.
    environment_reward: add the rewards that tools gave, their sum or the last one.
    require_tool_success: verifiers count nothing unless a tool was called, and every call answered
    something, in time and without an error.
    non_stop_penalty: takes the place of the score of a sample that did not end by itself.
    error_score: the score of a sample where a verifier broke. Its `Reward.error` says how, and a
    warning is logged.
    seconds: for one verifier on one sample, from when its turn comes (see `Verifier`); one that
        takes longer is broken. A verifier with a limit of its own, such as `CodeTests.seconds`,
        keeps to that one: it is the answer that takes too long there, and scores 0.
    """

    verifiers: Mapping[str, Verifier] = field(default_factory=dict)
    verification_reward: float = 10.0
    format: Verifier = field(default_factory=Format)
    format_reward: float = 0.0
    format_required: bool = False
    environment_reward: Literal["sum", "last"] | None = None
    require_tool_success: bool = False
    non_stop_penalty: float | None = None
    error_score: float = 0.0
    seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, verifier in {"format": self.format, **self.verifiers}.items():
            if not (iscoroutinefunction(verifier) or iscoroutinefunction(type(verifier).__call__)):
                raise ConfigError(f"the verifier {name!r} must be an async function; blocking work belongs into `asyncio.to_thread`")
        if not self.seconds > 0:
            raise ConfigError(f"seconds must be positive, not {self.seconds!r}")
        for name in ("verification_reward", "format_reward", "non_stop_penalty", "error_score"):
            if (value := getattr(self, name)) is not None and not math.isfinite(value):
                raise ConfigError(f"{name} must be a finite number, not {value!r}")

    def check(self, request: PromptRequest) -> None:
        """Raises `ConfigError` for a request with a label that no verifier understands."""
        if missing := sorted({label.verifier for label in request.labels} - set(self.verifiers)):
            known = ", ".join(self.verifiers) or "none"
            raise ConfigError(f"prompt {request.id}: there is no verifier {', '.join(missing)}; there are {known}")

    def build(self, tokenizer: Tokenizer) -> RewardFunction:
        """Makes a function that gives a result's samples their rewards. It never raises because
        of a verifier."""

        async def reward(result: GenerationResult) -> GenerationResult:
            rewards = await asyncio.gather(*(self._reward_or_error(result.request, sample, tokenizer) for sample in result.samples))
            samples = [structs.replace(sample, reward=reward) for sample, reward in zip(result.samples, rewards, strict=True)]
            return structs.replace(result, samples=samples)

        return reward

    async def _reward_or_error(self, request: PromptRequest, sample: Sample, tokenizer: Tokenizer) -> Reward:
        try:
            reward = await self._reward(request, sample, tokenizer)
            if not math.isfinite(reward.score):
                reward = Reward(self.error_score, reward.parts, f"the score is {reward.score}")
        except BaseException as error:
            if is_for_us(error):
                raise
            reward = Reward(self.error_score, [], told(error))
        if reward.error:
            logger.warning("sample %s has no score: %s", sample.id, reward.error)
        return reward

    async def _reward(self, request: PromptRequest, sample: Sample, tokenizer: Tokenizer) -> Reward:
        answer = Answer(own_text(sample, tokenizer), sample, request)
        words = [self._ask(label, answer) for label in request.labels]
        if self.format_reward or self.format_required:
            words.append(self._ask(Label("format", None), answer, self.format))
        parts = list(await asyncio.gather(*words))
        formatted = parts.pop() if len(parts) > len(request.labels) else None
        score = self.verification_reward * sum(part.value * part.weight for part in parts)
        if self.require_tool_success and not tools_succeeded(sample):
            score = 0.0
        if formatted is not None:
            fits = formatted.value > 0
            score = self.format_reward * fits + (0.0 if self.format_required and not fits else score)
            parts.append(structs.replace(formatted, weight=self.format_reward))
        if self.environment_reward:
            given = [record.reward for record in sample.tools if record.reward is not None]
            value = sum(given) if self.environment_reward == "sum" else sum(given[-1:])
            parts.append(_part("environment", value, 1.0))
            score += parts[-1].value
        if self.non_stop_penalty is not None and sample.finish_reason not in ENDED_WELL:
            score = self.non_stop_penalty
        broken = [f"{part.name}: {part.error}" for part in parts if part.error]
        if broken:
            return Reward(self.error_score, parts, "; ".join(broken))
        return Reward(score, parts)

    async def _ask(self, label: Label, answer: Answer, verifier: Verifier | None = None) -> RewardPart:
        """Returns a verifier's score, or the reason why there is none."""
        verifier = verifier or self.verifiers.get(label.verifier)
        if verifier is None:
            return RewardPart(label.verifier, 0.0, label.weight, "there is no such verifier")
        own = getattr(verifier, "own_seconds", None)
        seconds = self.seconds if own is None else own + BESIDE
        try:
            async with getattr(verifier, "turnstile", None) or nullcontext():
                value = await bounded(verifier(answer, label.value), seconds)
            return _part(label.verifier, value, label.weight)
        except TimeoutError:
            return RewardPart(label.verifier, 0.0, label.weight, f"no score in {seconds:g} seconds")
        except Exception as error:
            return RewardPart(label.verifier, 0.0, label.weight, told(error))


def _part(name: str, value: Any, weight: float) -> RewardPart:
    """Makes a reward part. A value that is no finite number becomes an error."""
    if isinstance(value, str | bytes):
        return RewardPart(name, 0.0, weight, f"the score is a {type(value).__name__}")
    value = float(value)
    return RewardPart(name, value, weight) if math.isfinite(value) else RewardPart(name, 0.0, weight, f"the score is {value}")


def own_text(sample: Sample, tokenizer: Tokenizer) -> str:
    """Returns the text that the model itself generated in all its turns, without special tokens."""
    own = [token for token, mine in zip(sample.token_ids, sample.mask, strict=True) if mine]
    return tokenizer.decode(own, skip_special_tokens=True)


def tools_succeeded(sample: Sample) -> bool:
    """Whether at least one tool was called, and every call succeeded with some output."""
    return bool(sample.tools) and all(record.outcome == "ok" and record.output for record in sample.tools)
