"""Group relative policy optimisation, one optimizer step a batch, without a KL term.

A prompt's completions i = 1..G have rewards r_i; mu is the policy that sampled (the engine), pi the
one being trained:

    A_i = (r_i - mean(r)) / std(r)                          DeepSeekMath, arXiv:2402.03300, section 4.1.2
    w_t = pi(y_t | ...) / mu(y_t | ...)
    L   = -1/T sum_t min(w_t A, clip(w_t, 1 - e, 1 + e) A)  over all T tokens of the batch: DAPO, arXiv:2503.14476, equation 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CLIP = 0.2


@dataclass(frozen=True)
class Group:
    """One prompt, the completions sampled for it, and one reward each. `logprobs[i][t]` is log mu
    of `completions[i][t]`."""

    prompt: list[int]
    completions: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]

    @property
    def teaches(self) -> bool:
        """Whether the rewards differ. Equal rewards give no advantage and no gradient."""
        return len(set(self.rewards)) > 1


@dataclass(frozen=True)
class Batch:
    """Groups in one row of N tokens: each prompt once, followed by its completions, T completion
    tokens in all.

    token_ids, position_ids: int64 [1, N]. mask: bool [1, 1, N, N], True where the row's token sees
    the column's.
    predictors: int64 [T], the position whose output predicts each completion token. targets: int64
    [T], that token.
    logprobs, advantages: float32 [T], of that token.
    """

    token_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    predictors: Tensor
    targets: Tensor
    logprobs: Tensor
    advantages: Tensor


def advantages(rewards: Sequence[float]) -> Tensor:
    """Returns the advantages, float32 [G]. All are zero if all rewards are equal."""
    r = torch.tensor(rewards, dtype=torch.float32)
    return (r - r.mean()) / (r.std(correction=0) + 1e-6)


def pack(groups: Sequence[Group]) -> Batch:
    """Packs groups into one row. A completion sees its prompt and itself, so that the prompt is
    computed once for the whole group."""
    token_ids: list[int] = []
    position_ids: list[int] = []
    group_of: list[int] = []
    completion_of: list[int] = []  # -1 marks the prompt
    predictors: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    weights: list[Tensor] = []

    for g, group in enumerate(groups):
        last_of_prompt = len(token_ids) + len(group.prompt) - 1
        token_ids += group.prompt
        position_ids += range(len(group.prompt))
        group_of += [g] * len(group.prompt)
        completion_of += [-1] * len(group.prompt)
        for c, completion in enumerate(group.completions):
            predictors += [last_of_prompt, *range(len(token_ids), len(token_ids) + len(completion) - 1)]
            token_ids += completion
            position_ids += range(len(group.prompt), len(group.prompt) + len(completion))
            group_of += [g] * len(completion)
            completion_of += [c] * len(completion)
            targets += completion
            logprobs += group.logprobs[c]
        lengths = torch.tensor([len(completion) for completion in group.completions])
        weights.append(advantages(group.rewards).repeat_interleave(lengths))

    group_id, completion_id = torch.tensor(group_of), torch.tensor(completion_of)
    same_group = group_id[:, None] == group_id
    visible = (completion_id == -1) | (completion_id[:, None] == completion_id)
    return Batch(
        token_ids=torch.tensor([token_ids]),
        position_ids=torch.tensor([position_ids]),
        mask=(same_group & visible).tril()[None, None],
        predictors=torch.tensor(predictors),
        targets=torch.tensor(targets),
        logprobs=torch.tensor(logprobs),
        advantages=torch.cat(weights),
    )


def token_logprobs(model: Any, batch: Batch) -> Tensor:
    """Returns log pi of each completion token, float32 [T]. `model` is a causal language model
    of transformers."""
    logits = model(
        batch.token_ids,
        attention_mask=batch.mask,
        position_ids=batch.position_ids,
        logits_to_keep=batch.predictors,
        use_cache=False,
    ).logits[0]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, batch.targets[:, None]).squeeze(1)


def loss(logprobs: Tensor, batch: Batch) -> Tensor:
    """Returns the loss, a scalar. logprobs: as `token_logprobs` returns them."""
    ratio = (logprobs - batch.logprobs).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
