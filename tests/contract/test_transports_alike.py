"""What holds over every transport that a machine without a GPU has. A new transport is one more name in `WAYS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
import torch

from instep import MemoryEngine, WeightSync
from instep.config import TransportName
from instep.errors import SourceError
from instep.protocol import ITEM_BYTES

WAYS: list[TransportName] = ["shm", "gloo", "http"]
VALUES = {
    **{f"of_{dtype}.weight": torch.arange(-6, 6).to(getattr(torch, dtype)).reshape(3, 4) for dtype in ITEM_BYTES},
    "scalar.weight": torch.tensor(2.5),
    "transposed.weight": torch.randn(3, 5).t(),
    "strided.weight": torch.randn(9, 4)[::2, 1:3],
    "bytes.weight": torch.arange(5, dtype=torch.uint8),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, segments: Path) -> Iterator[TransportName]:
    yield request.param
    assert list(segments.iterdir()) == [], "nothing stays in shared memory"


def zeros() -> MemoryEngine:
    return MemoryEngine({name: torch.zeros_like(value) for name, value in VALUES.items()})


def test_every_kind_of_tensor_arrives_bit_for_bit(way: TransportName) -> None:
    engine = zeros()
    with WeightSync(VALUES, [engine], transport=way) as sync:
        receipt = sync.push("v1")
    assert receipt.transport == way
    assert engine.fingerprint() == MemoryEngine(VALUES).fingerprint() != zeros().fingerprint()


def test_two_engines_have_the_same_after_three_pushes(way: TransportName) -> None:
    weights, engines = {name: value.clone() for name, value in VALUES.items()}, [zeros(), zeros()]
    with WeightSync(weights, engines, transport=way) as sync:
        for step in range(3):
            weights["scalar.weight"].fill_(step)
            sync.push(f"v{step}")
    assert {engine.fingerprint() for engine in engines} == {MemoryEngine(weights).fingerprint()}


def test_numbers_that_are_not_finite_are_named(way: TransportName) -> None:
    weights = {"good.weight": torch.ones(4), "bad.weight": torch.tensor([float("nan"), 1.0])}
    with WeightSync(weights, [MemoryEngine(weights)], transport=way) as sync:
        assert sync.push("v1").non_finite == ("bad.weight",)


class Restless(Mapping[str, torch.Tensor]):
    """Another value each time that it is asked for."""

    def __init__(self) -> None:
        self.times = count()

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.full((8,), float(next(self.times)))

    def __iter__(self) -> Iterator[str]:
        return iter(["w.weight"])

    def __len__(self) -> int:
        return 1


def test_a_source_that_changes_between_two_reads_is_refused(way: TransportName) -> None:
    engine = MemoryEngine({"w.weight": torch.ones(8)})
    before = engine.fingerprint()
    with WeightSync(Restless(), [engine], transport=way) as sync, pytest.raises(SourceError, match=r"w\.weight"):
        sync.push("v1")
    assert (engine.version, engine.fingerprint()) == (None, before)
