"""NCCL between this process and a worker in another one, on another GPU where there is one:
many buckets, every byte, and what ends a push half way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpus import OTHER_DEVICE, apart
from helpers.far_engine import FarEngine

from instep import WeightSync
from instep.bench import shapes
from instep.errors import InstepError, SyncError
from instep.transport.broadcast import publish as broadcast

TRANSPORTS: dict[Any, str] = {"nccl": "abcdefgh", "ipc": "ijklm"}
"""With the versions that go over each."""
MANY = broadcast.Settings(256 << 10, "commit", on_gpu=True)
"""Buckets so small that the tiny model fills many."""


def far(weights: dict[str, torch.Tensor], name: str) -> FarEngine:
    with apart():
        return FarEngine(weights, OTHER_DEVICE, name)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in shapes.model("tiny", 1, "cuda:0").named_parameters()}


@pytest.fixture(scope="module")
def engine(weights: dict[str, torch.Tensor]) -> Iterator[FarEngine]:
    engine = far(weights, "far")
    yield engine
    engine.stop()


def step(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor.neg_()


@pytest.mark.parametrize("way", [broadcast.SETTINGS["nccl"], MANY], ids=["one bucket", "many buckets"])
def test_every_byte_arrives(engine: FarEngine, weights: dict[str, torch.Tensor], way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(broadcast.SETTINGS, "nccl", way)
    with WeightSync(weights, [engine], transport="nccl", timeout=20) as sync:
        for version in "abcd":
            step(weights)
            receipt = sync.push(f"{version} {way.bucket}".replace(" ", "-"))
            assert engine.holds(weights)
        assert receipt.engines[0].direct
        assert receipt.engines[0].read_back == receipt.tensors


@pytest.mark.parametrize(("bucket", "after"), [(0, 0.5), (3, 0.5), (3, 0.0)])
def test_a_trainer_that_stops_sending(
    engine: FarEngine, weights: dict[str, torch.Tensor], bucket: int, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first bucket nothing has been written; afterwards the engine has parts of two versions, and a push heals it. Without a
    pause its first buckets are still on their way then."""
    monkeypatch.setitem(broadcast.SETTINGS, "nccl", MANY)
    packed = broadcast.BroadcastTransport._packed

    def breaks(*arguments: Any) -> Iterator[torch.Tensor]:
        for index, full in enumerate(packed(*arguments)):
            if index == bucket:
                time.sleep(after)
                raise RuntimeError("the trainer's disk is gone")
            yield full

    with WeightSync(weights, [engine], transport="nccl", timeout=10) as sync:
        sync.push(f"whole-{bucket}-{after}")
        before = {name: tensor.clone() for name, tensor in weights.items()}
        step(weights)
        monkeypatch.setattr(broadcast.BroadcastTransport, "_packed", breaks)
        started = time.monotonic()
        with pytest.raises(SyncError, match="disk is gone"):
            sync.push(f"halved-{bucket}-{after}")
        assert time.monotonic() - started < 10
        (state,) = sync.status()
        assert state.serving in (["dirty"] if bucket and after else ["old"] if not bucket else ["old", "dirty"])
        assert state.serving == "dirty" or engine.holds(before)
        monkeypatch.setattr(broadcast.BroadcastTransport, "_packed", packed)
        sync.push(f"whole-again-{bucket}-{after}")
        assert engine.holds(weights)


def test_a_worker_that_is_killed_ends_the_push(weights: dict[str, torch.Tensor]) -> None:
    engine = far(weights, "dies")
    with WeightSync(weights, [engine], transport="nccl", timeout=10) as sync:
        sync.push("one")
        engine.process.kill()
        started = time.monotonic()
        with pytest.raises(InstepError):
            sync.push("two")
        assert time.monotonic() - started < 15
    assert torch.ones(8, device="cuda:0").sum() == 8


def test_qwen3_0_6b_in_buckets_of_the_real_size() -> None:
    weights = {name: param.detach() for name, param in shapes.model("qwen3-0.6b", 1, "cuda:0").named_parameters()}
    engine = far(weights, "large")
    try:
        for transport, versions in TRANSPORTS.items():
            with WeightSync(weights, [engine], transport=transport, timeout=30) as sync:
                for version in versions:
                    step(weights)
                    receipt = sync.push(version)
                assert engine.holds(weights)
                print(receipt)
                print({name: round(1e3 * seconds, 1) for name, seconds in receipt.seconds.items()}, receipt.engines[0].apply)
    finally:
        engine.stop()
