"""Pushes over a private Gloo group: the same guarantees as over shared memory, and no wait without an end.

NCCL takes the same code; it runs in tests/gpu.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.toys import checkpoint
from torch.distributed import PrefixStore

from instep import MemoryEngine, WeightSync
from instep.errors import EngineLost, EngineTimeout, InstepError, SourceError, TransportError
from instep.source.module import MappingSource
from instep.transport.broadcast import publish as broadcast
from instep.transport.broadcast import read as broadcast_reader
from instep.transport.broadcast.publish import Settings
from instep.transport.bucket_digests import HostTally, Result
from instep.transport.group import BACKENDS, Group
from instep.transport.store import find, serve

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even a toy's tensors lie in several."""
    monkeypatch.setitem(broadcast.SETTINGS, "gloo", Settings(64 << 10, "prepare", on_gpu=False))


def same(engine: MemoryEngine, weights: dict[str, torch.Tensor]) -> bool:
    return engine.fingerprint() == MemoryEngine(weights, tp=len(engine.hosts)).fingerprint()


def test_processes_that_nccl_cannot_connect_are_told_what_they_differ_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on two GPUs: NCCL itself says "unhandled cuda error"."""

    def refuses(*_: object) -> None:
        raise RuntimeError("unhandled cuda error")

    monkeypatch.setitem(BACKENDS, "nccl", refuses)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    store = serve("127.0.0.1")
    for key, theirs in (("differs", "unset"), ("alike", "0")):
        other = PrefixStore(key, store)
        other.set("group 1", "here")
        other.set("settings 1", theirs)
        with pytest.raises(TransportError, match="unhandled cuda error") as caught:
            Group("nccl", store, key, 0, 2, CPU, 5)
        assert ("differ in NCCL_CUMEM_ENABLE (0 / unset: set it alike" in str(caught.value)) == (key == "differs")


def test_every_worker_of_every_engine_gets_the_bytes() -> None:
    engines = [MemoryEngine(checkpoint(0), name="a"), MemoryEngine(checkpoint(0), tp=2, name="b")]
    source = dict(checkpoint(1))
    with WeightSync(source, engines, transport="gloo") as sync:
        sync.push("one")
        used = sync._session.transport.used.group  # type: ignore[union-attr]
        assert all(same(engine, source) for engine in engines)
        source.update(checkpoint(2))
        receipt = sync.push("two")
        assert all(same(engine, source) for engine in engines)
        assert {engine.version for engine in engines} == {"two"}
        assert {receiver.history["two"] for engine in engines for receiver in engine.receivers} == {receipt.digest}
        assert sync._session.transport.used.group is used  # type: ignore[union-attr]


def test_a_number_that_is_not_finite_is_named() -> None:
    source = dict(checkpoint(1))
    source["model.norm.weight"][0] = float("nan")
    with WeightSync(source, [MemoryEngine(checkpoint(0))], transport="gloo") as sync:
        assert sync.push("one").non_finite == ("model.norm.weight",)


def test_bytes_that_change_on_the_way_are_refused_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bent(HostTally):
        def result(self) -> Result:
            return super().result()[0] | {"model.norm.weight": 1}, ()

    monkeypatch.setattr(broadcast_reader, "HostTally", Bent)
    engine = MemoryEngine(checkpoint(0))
    with WeightSync(checkpoint(1), [engine], transport="gloo") as sync:
        with pytest.raises(InstepError, match=r"model\.norm\.weight arrived with digest 0000000000000001") as caught:
            sync.push("one")
        assert type(caught.value).__name__ == "DigestMismatch"
        assert same(engine, checkpoint(0))
        assert [state.serving for state in sync.status()] == ["old"]


def test_a_restarted_engine_and_a_restarted_trainer_form_a_new_group() -> None:
    stays, dies = MemoryEngine(checkpoint(0), name="stays"), MemoryEngine(checkpoint(0), name="dies")
    source = dict(checkpoint(1))
    with WeightSync(source, [stays, dies], transport="gloo", require="any") as sync:
        sync.push("one")
        dies.dead = True
        source.update(checkpoint(2))
        assert [state.engine for state in sync.push("two").failed] == ["dies"]
        restarted = dies.restart(checkpoint(0))
        sync.catch_up(restarted)
        assert same(restarted, source)
        assert restarted.version == "two"
    with WeightSync(checkpoint(3), [stays, restarted], transport="gloo") as sync:
        sync.push("three")
    assert same(stays, checkpoint(3))
    assert same(restarted, checkpoint(3))


def test_there_is_nothing_to_catch_up_with_when_the_trainer_has_stepped() -> None:
    engine, late = MemoryEngine(checkpoint(0), name="a"), MemoryEngine(checkpoint(0), name="b")
    source = dict(checkpoint(1))
    with WeightSync(source, [engine], transport="gloo") as sync:
        sync.push("one")
        source["model.norm.weight"].add_(1)
        with pytest.raises(InstepError, match="no current version"):
            sync.catch_up(late)


class Breaks(MappingSource):
    """Fails in the middle of a push."""

    broken = False

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(super().tensors()):
            if self.broken and index == 5:
                raise SourceError("the trainer's disk is gone")
            yield item


def test_a_source_that_fails_half_way_leaves_every_engine_as_it_was() -> None:
    engines = [MemoryEngine(checkpoint(0), name="a"), MemoryEngine(checkpoint(0), tp=2, name="b")]
    source = Breaks(checkpoint(1))
    with WeightSync(source, engines, transport="gloo", timeout=20) as sync:
        source.broken = True
        started = time.monotonic()
        with pytest.raises(SourceError, match="disk is gone"):
            sync.push("one")
        assert time.monotonic() - started < 10
        assert all(same(engine, checkpoint(0)) for engine in engines)
        assert {state.serving for state in sync.status()} == {"old"}
        source.broken = False
        sync.push("two")
        assert all(same(engine, checkpoint(1)) for engine in engines)


@pytest.mark.parametrize("kind", ["error", "hang", "die"])
@pytest.mark.parametrize("first", [True, False], ids=["in the first push", "later"])
def test_an_engine_that_never_takes_part_makes_nobody_wait_for_ever(kind: str, first: bool) -> None:
    good, bad = MemoryEngine(checkpoint(0), name="good"), MemoryEngine(checkpoint(0), name="bad")
    source = dict(checkpoint(1))
    with WeightSync(source, [good, bad], transport="gloo", timeout=2) as sync:
        if not first:
            sync.push("zero")
        before = dict(checkpoint(0) if first else source)
        source.update(checkpoint(2))
        bad.inject("prepare", kind)  # type: ignore[arg-type]
        started = time.monotonic()
        with pytest.raises((TransportError, EngineLost, EngineTimeout)):
            sync.push("one")
        assert time.monotonic() - started < 12
        assert same(good, before)
        assert good.generate([1], 2)
        if kind == "die":
            bad = bad.restart(checkpoint(0))
            asyncio.run(sync._session.fleet.take_in(bad))
        sync.push("two")
        assert same(good, source)
        assert same(bad, source)


def test_a_transport_that_does_not_reach_the_engines_is_refused_with_the_reason() -> None:
    for name, reason in (("ipc", "the trainer's tensors are on cpu"), ("nccl", "is not on a GPU")):
        with (
            WeightSync(checkpoint(1), [MemoryEngine(checkpoint(0))], transport=name) as sync,  # type: ignore[arg-type]
            pytest.raises(TransportError, match=reason),
        ):
            sync.push("one")


RANK = textwrap.dedent("""
    import os, sys, time, torch
    from instep.transport.group import Group
    from instep.transport.store import find
    port, rank, size, what = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    group = Group("gloo", find("127.0.0.1", port, 20), "key", rank, size, torch.device("cpu"), 20)
    data = torch.zeros(1 << 22, dtype=torch.uint8)
    group.begin(20)
    for turn in range(50):
        if what == "dies" and turn == 3:
            os._exit(0)
        if what == "sleeps" and turn == 3:
            time.sleep(30)
        group.wait(group.broadcast(data))
""")


def _broadcast_often(group: Group, data: torch.Tensor) -> None:
    for _ in range(50):
        group.wait(group.broadcast(data))


@pytest.mark.parametrize(("what", "reason"), [("dies", "a peer failed"), ("sleeps", "peers did not take part within 2 s")])
def test_a_process_that_dies_or_sleeps_in_a_collective(what: str, reason: str) -> None:
    store = serve("127.0.0.1")
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK, str(store.port), str(rank), "3", what if rank == 2 else "goes on"]) for rank in (1, 2)
    ]
    try:
        group = Group("gloo", store, "key", 0, 3, CPU, 60)
        group.begin(2 if what == "sleeps" else 20)
        started = time.monotonic()
        data = torch.zeros(1 << 22, dtype=torch.uint8)
        with pytest.raises(TransportError, match=reason):
            _broadcast_often(group, data)
        assert time.monotonic() - started < 10
        assert processes[0].wait(timeout=20) != 0  # it is told, and ends too
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_group_whose_ranks_do_not_all_come_ends_at_its_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"rank 1 of 2 did not come within 0\.15 s"):
        Group("gloo", serve("127.0.0.1"), "key", 0, 2, CPU, 0.3)
    assert time.monotonic() - started < 5


def test_a_store_that_nobody_serves() -> None:
    store = serve("127.0.0.1")
    port = store.port
    del store
    with pytest.raises(TransportError, match="does not answer"):
        find("127.0.0.1", port, 0.5)


def test_a_store_listens_on_its_own_interface_alone() -> None:
    store = serve("127.0.0.1")
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("needs /proc/net/tcp")
    listening = [line.split()[1] for line in table.read_text().splitlines()[1:] if line.split()[3] == "0A"]
    assert [address.split(":")[0] for address in listening if int(address.split(":")[1], 16) == store.port] == ["0100007F"]
