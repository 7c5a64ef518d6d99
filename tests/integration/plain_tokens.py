"""A tokenizer for models without one, a tool with a parser, a verifier, a trainer's forward. Ray's processes import them from here."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from instep.generation import ToolDefinition
from instep.generation.types import ToolCall, ToolRecord


class Tokens:
    """A token is its number."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        raise AssertionError("nobody asked for it")


class OnceParser:
    """Takes every first turn for a call: a random model makes none of its own."""

    def __init__(self, tokenizer: Any) -> None: ...

    def stops(self, definitions: Any) -> tuple[str, ...]:
        return ()

    def parse(self, text: str, definitions: Any) -> list[ToolCall]:
        return [ToolCall("add", {"first": text.split()[0]})]

    def observe(self, records: list[ToolRecord], last: int) -> list[int]:
        return [int(word) for record in records for word in record.output.split()]


class Add:
    def describe(self) -> ToolDefinition:
        return ToolDefinition("add", "", {"type": "object", "properties": {"first": {"type": "string"}}})

    async def execute(self, first: str) -> str:
        await asyncio.sleep(0.01)
        return "7 8 9"


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
