"""Numbers about results, for a log. Names are `section/name`, times are seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from instep.generation.types import GenerationResult, Sample


class TokenStatistics(Struct, frozen=True):
    """Tokens of one result. The prompt counts once; a response's tokens are the model's and the
    tools'.

    seconds: from the first request to the end of the last sample. A sample's own are in
    `Sample.seconds`.
    """

    prompt_tokens: int
    response_tokens: int
    tool_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the model generated, divided by the result's whole time, tools included."""
        return (self.response_tokens - self.tool_tokens) / self.seconds if self.seconds > 0 else 0.0


def token_statistics(result: GenerationResult) -> TokenStatistics:
    """Counts a result's tokens. Samples of a prompt run side by side, so the longest one's time
    is the result's."""
    response = sum(len(sample.token_ids) for sample in result.samples)
    generated = sum(sum(sample.mask) for sample in result.samples)
    seconds = max((sample.seconds for sample in result.samples), default=0.0)
    return TokenStatistics(len(result.request.prompt_token_ids), response, response - generated, seconds)


def lag(sample: Sample, history: Sequence[str]) -> int:
    """Returns how many versions the oldest token of a sample is behind the last one of
    `history`; 0 without tokens.

    history: versions in the order in which they were pushed. A version that is not among them is
    older than all.
    """
    age = {version: len(history) - 1 - position for position, version in enumerate(history)}
    return max((age.get(span.version, len(history)) for span in sample.versions), default=0)


def metrics(results: Sequence[GenerationResult]) -> dict[str, float]:
    """Returns means over the samples of these results: lengths, finish reasons, rewards, and for
    each tool its calls, failures and seconds."""
    samples = [sample for result in results for sample in result.samples]
    if not samples:
        return {}
    statistics = [token_statistics(result) for result in results]
    numbers = {
        "tokens/prompt": _mean([token.prompt_tokens for token in statistics]),
        "tokens/response": _mean([len(sample.token_ids) for sample in samples]),
        "tokens/tool": sum(token.tool_tokens for token in statistics) / len(samples),
        "tokens/per_second": _mean([token.tokens_per_second for token in statistics]),
        "samples/turns": _mean([sample.turns for sample in samples]),
        "samples/seconds": _mean([sample.seconds for sample in samples]),
        "samples/versions": _mean([len({span.version for span in sample.versions}) for sample in samples]),
    }
    for reason, count in Counter(sample.finish_reason for sample in samples).items():
        numbers[f"finish/{reason}"] = count / len(samples)
    return {**numbers, **_rewards(samples), **_tools(samples)}


def _rewards(samples: Sequence[Sample]) -> dict[str, float]:
    rewards = [sample.reward for sample in samples if sample.reward]
    if not rewards:
        return {}
    numbers = {"reward/broken": _mean([reward.error is not None for reward in rewards])}
    if whole := [reward.score for reward in rewards if reward.error is None]:
        numbers["reward/score"] = _mean(whole)
    for name in sorted({part.name for reward in rewards for part in reward.parts}):
        values = [part.value for reward in rewards for part in reward.parts if part.name == name and not part.error]
        numbers |= {f"reward/{name}": _mean(values)} if values else {}
    return numbers


def _tools(samples: Sequence[Sample]) -> dict[str, float]:
    numbers = {}
    everything = [record for sample in samples for record in sample.tools]
    for name in sorted({record.tool for record in everything}):
        records = [record for record in everything if record.tool == name]
        run = [record for record in records if record.outcome in ("ok", "error", "timeout")]
        numbers[f"tools/{name}/calls"] = len(records) / len(samples)
        numbers[f"tools/{name}/excess"] = sum(record.outcome == "excess" for record in records) / len(samples)
        numbers[f"tools/{name}/failed"] = _mean([record.outcome != "ok" for record in records if record.outcome != "excess"])
        numbers[f"tools/{name}/seconds"] = _mean([record.seconds for record in run])
    return numbers


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
