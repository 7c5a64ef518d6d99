"""Sources that make a value when it is asked for, in memory that they use for the next one too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint

from instep import MemoryEngine, WeightSync
from instep.errors import SourceError
from instep.source.module import MappingSource
from instep.telemetry import Event
from unit.test_one_moment import COPIED, NAMES, same

pytestmark = pytest.mark.usefixtures("segments")


class Scratch(Mapping[str, torch.Tensor]):
    """Fills one buffer for whatever is asked for."""

    def __init__(self, weights: Checkpoint) -> None:
        self.weights, self.buffer = weights, torch.empty(8, 8)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.buffer.copy_(self.weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


class ScratchSource(MappingSource):
    """Does the same behind a dict."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(1 << 20)
        for name, value in super().tensors():
            yield name, buffer[: value.numel()].view(value.shape).copy_(value)


SCRATCH = {f"layers.{index}.weight": torch.full((8, 8), float(index + 1)) for index in range(3)}
LARGE = {f"layers.{index}.weight": torch.full((1024, 1024), float(index + 1)) for index in range(3)}


@pytest.mark.parametrize("transport", COPIED)
def test_a_mapping_that_fills_one_buffer_sends_every_tensor(transport: Any) -> None:
    engine = MemoryEngine({name: torch.zeros(8, 8) for name in SCRATCH})
    with WeightSync(Scratch(SCRATCH), [engine], transport=transport) as sync:
        assert sync.push("a").tensors == 3
    assert same(engine, SCRATCH)


@pytest.mark.parametrize("transport", COPIED)
def test_a_source_that_fills_one_buffer_sends_every_tensor(transport: Any) -> None:
    """They are large: what is copied in a thread would be overwritten before its turn."""
    engine = MemoryEngine({name: torch.zeros(1024, 1024) for name in LARGE})
    with WeightSync(ScratchSource(LARGE), [engine], transport=transport) as sync:
        assert sync.push("a").tensors == 3
    assert same(engine, LARGE)


def test_equal_values_in_one_buffer_are_tied_for_as_long_as_they_are_equal() -> None:
    """As all norms of a fresh model are: ones."""
    weights = {name: torch.ones(8, 8) for name in SCRATCH}
    engine = MemoryEngine({name: torch.zeros(8, 8) for name in SCRATCH})
    with WeightSync(Scratch(weights), [engine]) as sync:
        sync.push("a")
        assert same(engine, weights)
        weights[NAMES[1]] = torch.full((8, 8), 3.0)
        sync.push("b")
        assert same(engine, weights)


def test_a_tie_of_a_mapping_that_ends_during_the_copy_is_found_out() -> None:
    weights = {name: torch.ones(8, 8) for name in SCRATCH}
    engine = MemoryEngine({name: torch.zeros(8, 8) for name in SCRATCH})

    def sink(event: Event) -> None:
        if event.kind == "bytes":
            weights[NAMES[1]] = torch.full((8, 8), 3.0)

    with WeightSync(Scratch(weights), [engine], sinks=[sink]) as sync, pytest.raises(SourceError, match=r"layers\.1\.weight|changed"):
        sync.push("a")


def test_a_mapping_that_computes_its_values_keeps_a_tie() -> None:
    class Lazy(Mapping[str, torch.Tensor]):
        tied = torch.randn(20, 8)

        def __getitem__(self, name: str) -> torch.Tensor:
            return self.tied if "norm" not in name else torch.ones(8) * 2

        def __iter__(self) -> Iterator[str]:
            return iter(["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])

        def __len__(self) -> int:
            return 3

    assert [meta.alias_of for meta in MappingSource(Lazy()).metadata()] == [None, None, "model.embed_tokens.weight"]
