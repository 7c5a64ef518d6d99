"""Samples made by hand."""

from __future__ import annotations

from typing import Any

from instep.generation import PromptId, RequestId, Sample, VersionSpan


def sample(token_ids: list[int], number: int = 0, **fields: Any) -> Sample:
    """One whose tokens are all the model's, of version v1, unless the fields say otherwise."""
    count = len(token_ids)
    plain = {
        "logprobs": [-0.5] * count, "mask": [1] * count, "versions": [VersionSpan("v1", 0, count)] if count else [],
        "finish_reason": "stop", "turns": 1, "seconds": 2.0,
    }  # fmt: skip
    return Sample(**{"id": RequestId(PromptId("train", 0, "p"), number), "token_ids": token_ids, **plain, **fields})
