"""Weights that are known by name, and a trainer that pushes them under a version of its choice."""

from __future__ import annotations

from typing import Any

from helpers.toys import Checkpoint, attention
from instep import MemoryEngine, WeightSync

WEIGHTS = {name: attention(seed) for seed, name in enumerate(("start", "a", "b", "c"))}
FINGERPRINTS = {MemoryEngine(weights).fingerprint(): name for name, weights in WEIGHTS.items()}


def engine_named(name: str = "memory") -> MemoryEngine:
    return MemoryEngine(WEIGHTS["start"], name=name)


def serves(engine: MemoryEngine) -> tuple[str, str | None]:
    """The weights it holds and its label."""
    assert engine.generate([1], max_tokens=1)
    return FINGERPRINTS[engine.fingerprint()], engine.version


class Trainer:
    """A `WeightSync` whose source is one of `WEIGHTS`, by name."""

    def __init__(self, *engines: Any, **settings: Any) -> None:
        self.source: Checkpoint = dict(WEIGHTS["start"])
        self.sync = WeightSync(self.source, engines, **settings)

    def push(self, version: str, weights: str | None = None, base: str | None = None) -> Any:
        self.source.update(WEIGHTS[weights or version])
        return self.sync.push(version, base=base)
