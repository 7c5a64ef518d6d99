"""A tokenizer for models without one, a verifier, and what a trainer makes of samples. Ray's processes import them from here."""

from __future__ import annotations

from typing import Any

import torch


class Tokens:
    """A token is its number."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        raise AssertionError("nobody asked for it")


async def length(answer: Any, value: Any) -> float:
    """How many tokens the answer has."""
    if value == "break":
        raise ValueError("no verdict")
    return float(len(answer.text.split()))


def trainer_logprobs(model: Any, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    """Log-probabilities of the response's tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
