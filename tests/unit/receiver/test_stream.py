"""Versions that pass by in buckets during the commit, as over NCCL. Gloo carries them here, and memory of this process stands for a
card's (see `pretend_cuda.py`)."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.pretend_cuda import Table, pretend_nccl
from helpers.toys import Checkpoint, checkpoint

from instep import MemoryEngine, WeightSync
from instep.engine.memory_host import MemoryHost
from instep.errors import DigestMismatch, InstepError, SourceError, SyncError
from instep.plan.buckets import ALIGN
from instep.receiver.adapter import register
from instep.source.module import MappingSource
from instep.transport import bucket_digests
from instep.transport.broadcast import publish as broadcast
from instep.transport.broadcast import read as broadcast_reader
from instep.transport.group import Group


@pytest.fixture(autouse=True, params=[1, 3], ids=["small buckets", "larger buckets"])
def card(monkeypatch: pytest.MonkeyPatch, segments: Any, request: pytest.FixtureRequest) -> None:
    pretend_nccl(monkeypatch, request.param * ALIGN)


def step(weights: Checkpoint) -> None:
    for tensor in weights.values():
        tensor.neg_().sub_(1)


def same(engine: MemoryEngine, weights: Checkpoint) -> bool:
    return engine.fingerprint() == MemoryEngine(weights, tp=len(engine.hosts)).fingerprint()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_engines_follow_through_layers_written_directly_and_reloaded_ones(tp: int, tied: bool) -> None:
    weights = checkpoint(1, tied=tied)
    engines = [MemoryEngine(checkpoint(0, tied=tied), tp=tp, name=name) for name in "ab"]
    with WeightSync(weights, engines, transport="nccl") as sync:
        for version in "abcd":
            step(weights)
            receipt = sync.push(version)
            assert all(same(engine, weights) for engine in engines)
        assert receipt.engines[0].direct
        assert receipt.engines[0].read_back == receipt.tensors
        workers = [receiver.incarnation for engine in engines for receiver in engine.receivers]
        rooms = [room for worker in workers for room in broadcast_reader.JOINED[worker][1].rooms]
        assert len(rooms) == 2 * len(workers)
        assert {len(room) for room in rooms} == {broadcast.SETTINGS["nccl"].bucket}


def test_tensors_of_a_module_that_are_no_whole_words_are_read_anew_for_each_version() -> None:
    module, weights, engine = torch.nn.Module(), checkpoint(1), MemoryEngine(checkpoint(0))
    for name, tensor in weights.items():
        register(module, name, torch.nn.Parameter(tensor, requires_grad=False))
    with WeightSync(module, [engine], transport="nccl") as sync:
        for version in "abcd":
            step(weights)
            sync.push(version)
            assert same(engine, weights)


def test_tensors_that_lie_where_they_lay_are_sent_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {name: tensor for name, tensor in checkpoint(1).items() if tensor.nbytes % 8 == 0}
    engine = MemoryEngine({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    value, asked = MappingSource._value, list[str]()
    monkeypatch.setattr(MappingSource, "_value", lambda self, name: asked.append(name) or value(self, name))
    with WeightSync(weights, [engine], transport="nccl") as sync:
        for version, most in {"a": 9999, "b": 9999, "c": 2, "moved": 9999, "d": 9999, "e": 2}.items():
            step(weights)
            if version == "moved":
                weights["model.norm.weight"] = weights["model.norm.weight"].clone()
            asked.clear()
            sync.push(version)
            assert same(engine, weights)
            assert len(asked) <= most


def test_what_is_not_finite_is_named() -> None:
    weights = checkpoint(1)
    weights["model.norm.weight"][1] = float("inf")
    with WeightSync(weights, [MemoryEngine(checkpoint(0))], transport="nccl") as sync:
        assert sync.push("a").non_finite == ("model.norm.weight",)


@pytest.mark.parametrize("pushes", [0, 2], ids=["while layers are reloaded", "while they are written directly"])
def test_bytes_that_are_not_the_trainers_make_the_engine_dirty(pushes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = checkpoint(1)
    engine = MemoryEngine(checkpoint(0))
    with WeightSync(weights, [engine], transport="nccl") as sync:
        for index in range(pushes):
            step(weights)
            sync.push(f"v{index}")
        broadcast_of = Group.broadcast
        monkeypatch.setattr(Group, "broadcast", lambda self, tensor, root=0: _late(self, tensor, root, broadcast_of))
        step(weights)
        with pytest.raises(DigestMismatch):
            sync.push("bent")
        assert [state.serving for state in sync.status()] == ["dirty"]
        monkeypatch.setattr(Group, "broadcast", broadcast_of)
        sync.push("healed")
        assert same(engine, weights)


def _late(self: Group, tensor: torch.Tensor, root: int, broadcast_of: Any) -> Any:
    """The trainer's buckets leave as they are after they were added up."""
    if self.rank == 0 and len(tensor) > 8:
        tensor = tensor.clone()
        tensor[8] ^= 1
    return broadcast_of(self, tensor, root)


@pytest.mark.parametrize("error", [RuntimeError, SourceError])
@pytest.mark.parametrize("bucket", [0, 2])
@pytest.mark.parametrize("pushes", [0, 1], ids=["at once", "after a push"])
def test_a_trainer_that_stops_sending(pushes: int, bucket: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first bucket nothing has been written; afterwards the engine has parts of two versions and says so."""
    weights = checkpoint(1)
    engines = [MemoryEngine(checkpoint(0), name="a"), MemoryEngine(checkpoint(0), tp=2, name="b")]
    packed = broadcast.BroadcastTransport._packed

    def breaks(*arguments: Any) -> Iterator[torch.Tensor]:
        for index, full in enumerate(packed(*arguments)):
            if index == bucket:
                time.sleep(0.3)  # what was sent arrives
                raise error("the trainer's disk is gone")
            yield full

    with WeightSync(weights, engines, transport="nccl", timeout=20) as sync:
        for index in range(pushes):
            sync.push(f"whole-{index}")
        before = [engine.fingerprint() for engine in engines]
        step(weights)
        monkeypatch.setattr(broadcast.BroadcastTransport, "_packed", breaks)
        started = time.monotonic()
        with pytest.raises(SyncError, match="disk is gone") as caught:
            sync.push("halved")
        assert time.monotonic() - started < 10
        states = [state.serving for state in sync.status()]
        assert [state.serving for state in caught.value.engines] == states
        assert states == (["old", "old"] if bucket == 0 else ["dirty", "dirty"])
        if bucket == 0:
            assert [engine.fingerprint() for engine in engines] == before
            assert all(engine.generate([1], 1) for engine in engines)
        monkeypatch.setattr(broadcast.BroadcastTransport, "_packed", packed)
        sync.push("whole-again")
        assert all(same(engine, weights) for engine in engines)


def test_the_first_version_goes_to_the_loader_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is kept, and while the loader looks at a tensor nothing is under way."""
    arrived: dict[int, list[int]] = {0: [], 1: []}
    load = MemoryHost.load

    def looks(self: MemoryHost, tensors: Any) -> None:
        def each() -> Iterator[Any]:
            for name, tensor in tensors:
                if not tensor.is_meta:
                    (receiver,) = (receiver for receiver in engine.receivers if receiver.host is self)
                    assert receiver.prepared
                    reader: Any = receiver.prepared.reader
                    assert not reader.buckets.under_way
                    arrived[self.rank].append(reader.buckets.arrived)
                yield name, tensor

        load(self, each())

    weights = checkpoint(1)
    fresh, engine = MemoryEngine(weights, tp=2).fingerprint(), MemoryEngine(checkpoint(0), tp=2)
    monkeypatch.setattr(MemoryHost, "load", looks)
    with WeightSync(weights, [engine], transport="nccl") as sync:
        sync.push("one")
    assert engine.fingerprint() == fresh
    for of_each in arrived.values():
        assert of_each == sorted(of_each)
        rehearsed, of_each = of_each[: len(of_each) // 2], of_each[len(of_each) // 2 :]
        assert set(rehearsed) == {2}  # with weights that are nobody's: no bucket is taken for it
        assert of_each[0] == 2 < of_each[len(of_each) // 2] < of_each[-1]


@pytest.mark.parametrize("tensor", [0, 3])
def test_others_do_not_suffer_from_a_loader_that_fails(tensor: int) -> None:
    """It takes what is still to come, which others wait for."""
    weights = checkpoint(1)
    good, bad = MemoryEngine(checkpoint(0), name="good"), MemoryEngine(checkpoint(0), name="bad")
    with WeightSync(weights, [good, bad], transport="nccl", timeout=20) as sync:
        bad.inject("tensor", tensor=tensor)
        with pytest.raises(SyncError, match="told to fail"):
            sync.push("one")
        assert [state.serving for state in sync.status()] == ["old", "dirty"]
        assert same(good, weights)
        step(weights)
        sync.push("two")
        assert same(good, weights)
        assert same(bad, weights)


def test_nothing_is_brought_to_a_gpu_while_buckets_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait, without a deadline, for what the GPU's stream waits for: a peer that has died."""
    waiting: dict[int, int] = defaultdict(int)  # of each thread: what its stream waits for and nobody has seen arrive
    late: list[int] = []
    most = [0]
    wait, settle, made = Group.wait, Group.settle, Table.__init__

    def waits(self: Group, work: Any) -> None:
        wait(self, work)
        waiting[threading.get_ident()] += 1
        most[0] = max(most[0], waiting[threading.get_ident()])

    def settles(self: Group) -> None:
        settle(self)
        waiting[threading.get_ident()] = 0

    def looks(self: Table, *arguments: Any, **named: Any) -> None:
        late.append(waiting[threading.get_ident()])
        made(self, *arguments, **named)

    monkeypatch.setattr(Group, "wait", waits)
    monkeypatch.setattr(Group, "settle", settles)
    monkeypatch.setattr(Table, "__init__", looks)
    weights = checkpoint(1)
    with WeightSync(weights, [MemoryEngine(checkpoint(0), tp=2)], transport="nccl") as sync:
        for version in "abc":  # reloaded, then written directly by new tables, then by the same
            step(weights)
            sync.push(version)
    assert most[0] > 2
    assert late
    assert not any(late)


@pytest.mark.parametrize("point", ["pause", "commit"])
@pytest.mark.parametrize("kind", ["error", "hang"])
def test_an_engine_that_does_not_get_to_the_commit(point: Any, kind: Any) -> None:
    """The others wait for bytes that will not come, and end with the old version."""
    weights = checkpoint(1)
    good, bad = MemoryEngine(checkpoint(0), name="good"), MemoryEngine(checkpoint(0), name="bad")
    with WeightSync(weights, [good, bad], transport="nccl", timeout=2) as sync:
        sync.push("one")
        before = good.fingerprint()
        step(weights)
        bad.inject(point, kind)
        started = time.monotonic()
        with pytest.raises(InstepError):
            sync.push("two")
        assert time.monotonic() - started < 12
        assert good.fingerprint() == before
        assert good.generate([1], 1)
        sync.push("three")
        assert same(good, weights)
        assert same(bad, weights)


def test_what_lies_where_it_lay_is_moved_by_one_launch_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the trainer's side too. PyTorch copies what has another dtype, is not contiguous, is of odd size, or has moved."""
    put: list[str] = []
    copies = bucket_digests._put

    def counts(bucket: torch.Tensor, contents: bucket_digests.Contents, data: torch.Tensor) -> None:
        put.append(contents[0].name)
        copies(bucket, contents, data)

    monkeypatch.setattr(bucket_digests, "_put", counts)
    weights = checkpoint(1)
    turned, cast, moves = sorted(weights)[:3]
    weights[turned] = weights[turned].t().contiguous().t()
    weights[cast] = weights[cast].float()
    engine = MemoryEngine(checkpoint(0))
    found = []
    with WeightSync(weights, [engine], transport="nccl", cast=True) as sync:
        for version in "abcde":
            for tensor in weights.values():
                tensor.neg_()
            if version == "d":
                weights[moves] = weights[moves].clone()
            put.clear()
            sync.push(version)
            assert same(engine, {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})
            found.append(set(put))
    odd = {name for name, tensor in weights.items() if tensor.to(torch.bfloat16).nbytes % 8}
    always = {turned, cast} | odd
    assert found[0] == set(weights)
    assert found[1] == found[2] == found[4] == always
    assert always | {moves} <= found[3] < set(weights)
