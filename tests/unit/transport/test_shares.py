"""Workers of one engine that see the same bytes look at them once, together; wrong bytes are found whoever looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.toys import attention, checkpoint

from instep import WeightSync
from instep.digest import BLOCK_BYTES, BLOCK_WORDS, Bytes, Words, all_sums
from instep.engine.memory import MemoryEngine
from instep.errors import DigestMismatch
from instep.plan import packed as places
from instep.plan.buckets import layout
from instep.protocol import Manifest, TensorMeta, dtype_name
from instep.transport.reader import WorkerContext
from instep.transport.registry import open_location

BIG = {name: torch.randn(200, 300) for name in ("a.weight", "b.weight", "c.weight")}
"""Eight blocks each."""


def blocks(seed: int) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, seed) for name, value in BIG.items()}


@pytest.mark.parametrize("tp", [1, 2])
def test_each_byte_is_read_once_for_an_engine(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(data: Bytes, words: int = BLOCK_WORDS) -> Words:
        read.append(data.size)
        return all_sums(data, words)

    monkeypatch.setattr(places, "all_sums", counted)
    size = layout([TensorMeta(name, dtype_name(value.dtype), tuple(value.shape)) for name, value in BIG.items()])[1]
    engine = MemoryEngine({name: torch.zeros_like(value) for name, value in BIG.items()}, tp=tp)
    with WeightSync(BIG, [engine], transport="shm") as sync:
        sync.push("v1")
    assert len(read) == tp
    assert sum(read) == size
    assert max(read) - min(read) <= BLOCK_BYTES


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", [0, -1])
@pytest.mark.parametrize("weights", [attention, blocks], ids=["small", "large"])
def test_a_wrong_byte_is_found_by_the_worker_whose_share_it_is_in(rank: int, part: int, weights: Callable[[int], Any]) -> None:
    """In the first or in the last of tensors that lie side by side, which are in different shares. Each worker is given memory of its own
    here."""
    engine = MemoryEngine(weights(0), tp=2)
    fingerprint = engine.fingerprint()

    def wrong(manifest: Manifest, me: WorkerContext) -> Any:
        reader: Any = open_location(manifest, me)
        reader.bytes = reader.bytes.copy()
        shelf = max(reader.places.shelves, key=lambda shelf: len(shelf.names), default=None)
        names = shelf.names if shelf else list(BIG)
        assert len(names) > 1
        reader.bytes[reader.places.offsets[names[part]]] ^= np.uint8(1)
        return reader

    right, engine.receivers[rank].open_reader = engine.receivers[rank].open_reader, wrong
    with WeightSync(weights(1), [engine], transport="shm") as sync:
        if (rank == 0) == (part == 0):
            with pytest.raises(DigestMismatch, match="arrived with digest"):
                sync.push("v1")
            assert engine.version is None
            assert engine.fingerprint() == fingerprint
        else:
            sync.push("v1")  # what this worker does not look at, the other does
        engine.receivers[rank].open_reader = right
        sync.push("v2")
    wanted = MemoryEngine(weights(1), tp=2)
    assert engine.fingerprint() == wanted.fingerprint()


@pytest.mark.parametrize("told", [{}, {"model.norm.weight": 7}])
def test_a_worker_that_tells_nothing_or_something_else_is_no_proof(told: dict[str, int]) -> None:
    engine = MemoryEngine(checkpoint(seed=0), tp=2)

    def silent(manifest: Manifest, me: WorkerContext) -> Any:
        reader: Any = open_location(manifest, me)
        reader.arrive = lambda _: dict(told)
        return reader

    engine.receivers[1].open_reader = silent
    with WeightSync(checkpoint(seed=1), [engine], transport="shm") as sync, pytest.raises(DigestMismatch):
        sync.push("v1")
    assert engine.version is None
