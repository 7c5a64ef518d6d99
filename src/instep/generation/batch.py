"""Makes tensors of one shape from samples, for a trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from instep.errors import ConfigError
from instep.generation.types import GenerationResult, RequestId


@dataclass(frozen=True)
class Batch:
    """B samples, padded on the right to the T tokens of the longest. Position t of each tensor
    is about token t.

    token_ids: int64 [B, T], prompt and response. attention_mask: bool [B, T], tokens that are not
    padding. position_ids: int64 [B, T].
    response_mask: bool [B, T], the tokens to train on. logprobs: float32 [B, T], the engine's, 0
    where `response_mask` is false.
    version_ids: int64 [B, T], index into `versions` of the weights that a token was sampled with;
    -1 for all others.
    rewards: float32 [B], NaN for a sample without one or with a broken verifier.
    ids: which sample each row is.
    """

    token_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    response_mask: torch.Tensor
    logprobs: torch.Tensor
    version_ids: torch.Tensor
    rewards: torch.Tensor
    versions: list[str]
    ids: list[RequestId]


def collate(results: Sequence[GenerationResult], pad_token_id: int, *, train_on_tool_output: bool = False) -> Batch:
    """Makes a batch of all samples of these results, in order.

    train_on_tool_output: count the tools' tokens as response too. They have the log-probability 0.
    Raises `ConfigError` for no samples.
    """
    rows = [(result.request.prompt_token_ids, sample) for result in results for sample in result.samples]
    if not rows:
        raise ConfigError("there are no samples to make a batch of")
    shape = len(rows), max(len(prompt) + len(sample.token_ids) for prompt, sample in rows)
    versions = list(dict.fromkeys(span.version for _, sample in rows for span in sample.versions))
    token_ids = torch.full(shape, pad_token_id)
    attention_mask, response_mask = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    logprobs, version_ids = torch.zeros(shape), torch.full(shape, -1)
    rewards = torch.full(shape[:1], math.nan)
    for row, (prompt, sample) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(sample.token_ids)
        token_ids[row, :end] = torch.tensor([*prompt, *sample.token_ids])
        attention_mask[row, :end] = True
        response_mask[row, start:end] = True if train_on_tool_output else torch.tensor(sample.mask, dtype=torch.bool)
        logprobs[row, start:end] = torch.tensor(sample.logprobs)
        for span in sample.versions:
            version_ids[row, start + span.start : start + span.end] = versions.index(span.version)
        if sample.reward and not sample.reward.error:
            rewards[row] = sample.reward.score
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    ids = [sample.id for _, sample in rows]
    return Batch(token_ids, attention_mask, position_ids, response_mask, logprobs, version_ids, rewards, versions, ids)
