"""The benchmark's trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from instep.bench import shapes


class Trainer:
    """A model whose optimizer only negates. Every weight changes, and none leaves its range."""

    def __init__(self, name: str, device: str) -> None:
        self.device = device
        self.model = shapes.model(name, 1, device)
        self.tensors: dict[str, torch.Tensor] = {name: param.detach() for name, param in self.model.named_parameters()}
        self.steps = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def step(self) -> None:
        torch._foreach_neg_(list(self.tensors.values()))
        self.steps += 1
        synchronize()

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every tensor, for ways that send them one by one."""
        return iter(self.tensors.items())

    def close(self) -> None:
        """Does nothing: the memory is freed with the trainer."""

    def scores(self, tokens: list[int]) -> list[float]:
        """Returns log-probabilities (natural log) of `tokens[1:]`, each given the tokens before
        it."""
        ids = torch.tensor([tokens], device=self.device)
        with torch.no_grad():
            scores = self.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        found: list[float] = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found

    def save(self, folder: Path) -> None:
        """Saves as users do, but without transformers' progress bar."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.model.save_pretrained(folder)


def synchronize() -> None:
    """Waits for all GPUs, if there are any."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def timed_runs(call: Callable[[], object], warm_ups: int, repeats: int) -> list[float]:
    """Returns the seconds of each of `repeats` calls, the wait for all GPUs included."""
    seconds = []
    for _ in range(warm_ups + repeats):
        synchronize()
        started = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[warm_ups:]


def largest(differences: list[float]) -> float:
    """Returns the maximum; infinity if one number is NaN."""
    return max((math.inf if math.isnan(value) else value for value in differences), default=math.inf)
