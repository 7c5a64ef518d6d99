"""What is put aside of a version that passes by: handed over in turn, and let go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.toys import Checkpoint, described

from instep.plan.buckets import ALIGN, layout, pieces
from instep.protocol import TensorMeta
from instep.receiver import streamed
from instep.receiver.streamed import Passed, StreamedStateDict

CPU = torch.device("cpu")


def tensors() -> Checkpoint:
    sizes = {"a": (ALIGN // 8,), "b": (3 * ALIGN // 8, 2), "empty": (0, 4), "c": (5,), "d": (ALIGN // 4, 2)}
    return {name: torch.randn(size) for name, size in sizes.items()}


def passing(weights: Checkpoint, metas: list[TensorMeta], took: list[int]) -> Iterator[Passed]:
    """Buckets as they come, in one memory that each overwrites."""
    offsets, size = layout(metas)
    version = torch.zeros(size, dtype=torch.uint8)
    for name, tensor in weights.items():
        version[offsets[name] : offsets[name] + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    room = torch.empty(2 * ALIGN, dtype=torch.uint8)
    for index, found in enumerate(pieces(metas, 2 * ALIGN)):
        took.append(index)
        part = version[2 * ALIGN * index :][: 2 * ALIGN]
        room[: len(part)] = part
        yield [(meta, rows, room[rows.place : rows.end]) for meta, rows in found]


def start(kept: set[str]) -> tuple[Checkpoint, StreamedStateDict, list[int]]:
    weights, took = tensors(), list[int]()
    metas = [*described(weights), TensorMeta("tied", "float32", (5,), alias_of="c")]
    return weights, StreamedStateDict({meta.name: meta for meta in metas}, set(weights), kept, passing(weights, metas, took), CPU), took


def test_a_bucket_is_taken_when_something_in_it_is_asked_for() -> None:
    weights, put, took = start({"c"})
    assert list(put) == [*weights, "tied"]
    assert took == []
    needed = {}
    for name in weights:
        assert torch.equal(put[name], weights[name])
        needed[name] = len(took)
    assert needed == {"a": 1, "b": 2, "empty": 2, "c": 3, "d": 4}
    assert torch.equal(put["tied"], weights["c"])
    assert set(put.rooms) == {"c"}
    with pytest.raises(KeyError):
        put["a"]


def test_what_was_not_asked_for_is_taken_at_the_end() -> None:
    weights, put, took = start(set(tensors()))
    assert torch.equal(put["b"], weights["b"])
    put.take_all()
    assert put.ended
    assert len(took) == 4
    assert all(torch.equal(put[name], tensor) for name, tensor in weights.items())


def test_at_the_end_only_what_is_kept_is_put_anywhere() -> None:
    weights, put, took = start({"c"})
    assert torch.equal(put["a"], weights["a"])
    put.take_all()
    assert len(took) == 4
    assert set(put.rooms) == {"c"}
    assert torch.equal(put["tied"], weights["c"])


def test_it_goes_to_host_memory_where_the_gpu_has_no_room_for_the_loader_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    metas = described(tensors())
    _, put, _ = start(set())
    put.device = torch.device("meta")  # stands for the GPU
    monkeypatch.setattr(streamed, "free", lambda _: 2 * put.largest + metas[0].nbytes + metas[1].nbytes)
    put._make_room(metas)
    assert {name: room.device.type for name, room in put.rooms.items()} == {
        "a": "meta", "b": "meta", "empty": "meta", "c": "cpu", "d": "cpu",
    }  # fmt: skip
    assert start(set(tensors()))[1].device.type == "cpu"  # what is kept
