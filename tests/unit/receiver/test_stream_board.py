"""Sums of a version that passes by in buckets, without a GPU (see `pretend_cuda.py`)."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.pretend_cuda import Table, pretend_nccl
from helpers.toys import checkpoint

from instep import MemoryEngine, WeightSync
from instep.plan.buckets import ALIGN


def test_sums_of_all_buckets_take_the_room_of_one(monkeypatch: pytest.MonkeyPatch, segments: Any) -> None:
    """However many buckets there are, on both sides: with thousands of tensors in hundreds of buckets a row for each takes gigabytes."""
    pretend_nccl(monkeypatch, ALIGN)
    boards: dict[int, int] = {}
    tables: list[Table] = []
    made = Table.__init__

    def notes(self: Table, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        tables.append(self)
        boards[self.sums.untyped_storage().data_ptr()] = self.sums.untyped_storage().nbytes()

    monkeypatch.setattr(Table, "__init__", notes)
    weights, engine = checkpoint(1), MemoryEngine(checkpoint(0))
    with WeightSync(weights, [engine], transport="nccl") as sync:
        sync.push("a")
        for tensor in weights.values():
            tensor.neg_()
        tables.clear()
        boards.clear()
        sync.push("b")  # written directly, by new tables, of memory that lies where it lay
        assert engine.fingerprint() == MemoryEngine(weights).fingerprint()
    assert len(boards) <= 3, "of the trainer's first read, of the worker's buckets, and of what it compares"
    assert max(boards.values()) <= 8 * 2 * 3 * len(weights), "moved, put aside and read, with flags"
