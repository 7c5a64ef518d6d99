"""The log of a run. `Run` is its JSON form."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

RISE = 0.2
"""Without any learning, a mean of 32 right or wrong replies rises by this much in about one run of
twenty."""


class Step(msgspec.Struct, frozen=True):
    """One step of the trainer. Its rewards are of completions sampled before its update, from
    weights that the engine labels `sampled_from`."""

    step: int
    sampled_from: list[str]
    reward: float
    group_rewards: list[float]
    """The mean of each question's completions; their spread is what GRPO learns from."""
    tokens: int
    generate_seconds: float
    train_seconds: float
    loss: float | None
    """None where every group's rewards were equal, so that there was nothing to learn."""
    push: dict[str, Any]
    """The receipt."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.generate_seconds


class Answer(msgspec.Struct, frozen=True):
    question: str
    reply: str
    reward: float


class Exam(msgspec.Struct, frozen=True):
    """Results on questions that are never trained on: the mean reward of all replies, and the
    first reply to each."""

    reward: float
    answers: list[Answer]


class Run(msgspec.Struct):
    model: str
    engine: str
    processor: str
    versions: dict[str, str]
    seed: int
    reward: str
    """What the reward checks."""
    before: Exam
    after: Exam
    steps: list[Step]
    seconds: dict[str, float]
    """Seconds of the whole run: start, steps, total."""

    def verdict(self) -> str:
        """Returns one line that sums up the run."""
        pushes = [step.push for step in self.steps]
        gaps = [push["canary_gap"] for push in pushes if push["canary_gap"] is not None]
        took, paused = median(push["seconds"]["total"] for push in pushes), median(push["pause"] for push in pushes)
        return (
            f"{self.model} {'learned' if self.after.reward > self.before.reward + RISE else 'did not learn'}: "
            f"reward {self.steps[0].reward:.2f} to {self.steps[-1].reward:.2f} in {len(pushes)} steps "
            f"({self.before.reward:.2f} to {self.after.reward:.2f} on questions never trained on); "
            f"{self.engine} followed each step: {pushes[0]['nbytes'] / 1e6:.3g} MB in {1e3 * took:.0f} ms, "
            f"paused {1e3 * paused:.0f} ms (medians), every digest equal" + (f", canary gap at most {max(gaps):.1g}" if gaps else "")
        )

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def processor() -> str:
    """Returns the CPU's name, and the number of threads that torch uses."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor() or platform.machine())
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads != 1)}"


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("instep", "torch", "transformers")}
