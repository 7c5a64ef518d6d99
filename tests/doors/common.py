"""What the programs of this folder share: an engine, a trainer that learns, and how far the two are apart."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import torch
from engines import greedy, start
from models import PROMPTS, tiny

STEPS = 3


class Trainer:
    """A model in float32 that learns one sentence by heart."""

    def __init__(self, family: str = "qwen3", seed: int = 1) -> None:
        self.model = tiny(family, seed).float()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self) -> None:
        tokens = torch.tensor([PROMPTS[1]])
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pairs(self, without: str = "") -> list[tuple[str, torch.Tensor]]:
        return [(name, value.detach()) for name, value in self.model.named_parameters() if name != without]

    def logprobs(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
        return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


def engine(folder: Path, **arguments: Any) -> Any:
    return start(folder, load_format="auto", **{"dtype": "float32", **arguments})


def look(llm: Any, trainer: Trainer) -> dict[str, Any]:
    """Nats between engine and trainer, over the tokens of the engine, and whether the tokens are the trainer's."""
    llm.reset_prefix_cache()
    found = greedy(llm, PROMPTS)
    both = list(zip(PROMPTS, found, strict=True))
    gaps = [(torch.tensor(told) - trainer.logprobs(prompt, tokens)).abs().max().item() for prompt, (tokens, told) in both]
    same = all(trainer.greedy(prompt, len(tokens)) == tokens for prompt, (tokens, _) in both)
    return {"gap": max(gaps), "same": same, "tokens": [tokens for tokens, _ in found]}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
