"""What no tool may answer, what ends an event loop, and prompts that are none."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec

from instep import generation
from instep.generation import PromptRequest, Sampling

Label: Any = generation.Label  # what is made here has fields of wrong types
PromptId: Any = generation.PromptId
ToolOutput: Any = generation.ToolOutput


class Unprintable:
    """What has no text."""

    def __str__(self) -> str:
        raise RecursionError

    __repr__ = __str__


WRONG = {
    "text-number": ToolOutput(text=5), "text-none": ToolOutput(text=None), "text-bytes": ToolOutput(text=b"x"),
    "error-number": ToolOutput(error=5), "error-exception": ToolOutput(error=ValueError("x")), "role": ToolOutput(role=None),
    "info": ToolOutput(info=[1]), "done": ToolOutput(done="no"), "reward-text": ToolOutput(text="a", reward="1"),
    "reward-nan": ToolOutput(text="a", reward=math.nan), "reward-inf": ToolOutput(reward=-math.inf),
    "reward-huge": ToolOutput(reward=10**400), "reward-list": ToolOutput(reward=[1.0]),
    "reward-unprintable": ToolOutput(reward=Unprintable()),
    "no-text": Unprintable(),
}  # fmt: skip


class Rust(BaseException):
    """As panics of libraries that are written in Rust are."""


ENDS = [SystemExit(3), KeyboardInterrupt(), Rust("panic"), asyncio.CancelledError(), RecursionError(), StopIteration(), GeneratorExit()]


def strange_prompts() -> dict[str, Any]:
    plain = PromptRequest(id=PromptId("train", 0, "strange"), prompt_token_ids=[65], sampling=Sampling(max_tokens=4))

    def having(**fields: Any) -> PromptRequest:
        return msgspec.structs.replace(plain, **fields)

    def sampling(**fields: Any) -> PromptRequest:
        made = msgspec.structs.replace(plain.sampling)
        for name, value in fields.items():
            msgspec.structs.force_setattr(made, name, value)
        return having(sampling=made)

    return {
        "tool": having(tools=("saw",)), "tools-text": having(tools="say"), "tools-number": having(tools=5), "tools-odd": having(tools=(5,)),
        "verifier": having(labels=(Label("nobody", 1),)), "label": having(labels=(5,)), "labels": having(labels=5),
        "weight": having(labels=(Label("v", 1, math.nan),)), "weight-text": having(labels=(Label("v", 1, "2"),)),
        "token-text": having(prompt_token_ids=["a"]), "token-negative": having(prompt_token_ids=[-1]), "tokens": having(prompt_token_ids=5),
        "token-float": having(prompt_token_ids=[1.5]), "token-none": having(prompt_token_ids=[None]),
        "sampling": having(sampling=None), "n-text": sampling(n="2"), "n-huge": sampling(n=10**12), "n-none": sampling(n=None),
        "temperature": sampling(temperature="hot"), "stop": sampling(stop=(5,)), "stop-surrogate": sampling(stop=("\ud83d",)),
        "max-tokens": sampling(max_tokens=None), "extra": sampling(extra=5),
        "id": having(id="strange"), "id-none": having(id=None), "id-list": having(id=PromptId("train", [], "x")),
        "id-split": having(id=PromptId("test", 0, "x")), "id-surrogate": having(id=PromptId("train", 0, "\ud83d")),
        "config": having(tool_config=5), "config-odd": having(tool_config={"say": 5}), "metadata": having(metadata=None),
        "object": object(), "dict": {"prompt": [1]}, "text": "prompt",
    }  # fmt: skip
