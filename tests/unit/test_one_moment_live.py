"""What is sent out of the trainer's own memory is of one moment, or no engine gets its label: over Gloo, NCCL and CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from helpers.pretend_cuda import pretend_nccl
from torch import nn

from instep import MemoryEngine, WeightSync
from instep.errors import DigestMismatch, EngineDirty, InstepError, SourceError, VersionConflict
from instep.plan.buckets import ALIGN
from instep.receiver.pull import Puller
from instep.transport.again import check
from instep.transport.broadcast import publish as broadcast
from instep.transport.bucket_digests import DeviceTally
from unit.receiver.test_scratch_buffers import LARGE, SCRATCH, Scratch, ScratchSource
from unit.test_one_moment import NAMES, WRITES, Trainer, model, module_of, same, zeros

pytestmark = pytest.mark.usefixtures("segments")


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of this process stands for that of cards. A tensor of these tests takes two buckets, the first and the last share one."""
    pretend_nccl(monkeypatch, ALIGN)
    monkeypatch.setitem(broadcast.SETTINGS, "gloo", broadcast.Settings(ALIGN, "prepare", on_gpu=False))


def fails(sync: WeightSync, version: str) -> InstepError | None:
    try:
        sync.push(version)
    except InstepError as error:
        return error
    return None


@pytest.mark.parametrize("transport", ["gloo", "nccl", "ipc"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("moment", [(1, 0), (1, 1), (1, 3), (2, 0), (2, 1), (2, 3)])
def test_a_write_at_any_point_of_either_read(write: Any, moment: tuple[int, int], transport: Any) -> None:
    """Whatever happens: it holds what the trainer had at one moment under the label, what it had before, or it refuses."""
    source, engine = Trainer(write, *moment), MemoryEngine(zeros())
    untouched = engine.fingerprint()
    with WeightSync(source, [engine], transport=transport, timeout=20) as sync:
        error = fails(sync, "a")
        if error is None:
            assert (engine.fingerprint() in source.states, engine.version) == (True, "a")
        elif isinstance(error, SourceError):
            assert (engine.fingerprint(), engine.version, engine.refusal) == (untouched, None, None)
            assert "no engine was touched" in str(error)
        else:
            assert isinstance(error, DigestMismatch)
            assert engine.version is None
            with pytest.raises(EngineDirty):
                engine.generate([1], 1)
        if transport != "ipc":  # there it is only said in this moment where the tensors lie
            assert (error is None) <= (moment in ((1, 0), (2, 1), (2, 3))), "what was read once already has changed"
        if transport == "gloo":
            assert not isinstance(error, DigestMismatch)
        sync.push("b")
    assert engine.fingerprint() == source.state()
    assert engine.generate([1], 1)


def between_the_reads(monkeypatch: pytest.MonkeyPatch, write: Callable[[], object]) -> None:
    """When everything has been read once, and before it is read again."""
    left = [True]

    def before(action: Any) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            if left:
                left.clear()
                write()
            return action(*arguments, **named)

        return called

    monkeypatch.setattr(broadcast, "check", before(check))
    monkeypatch.setattr(DeviceTally, "begin", before(DeviceTally.begin))
    monkeypatch.setattr(Puller, "launch", before(Puller.launch))


@pytest.mark.parametrize("transport", ["gloo", "nccl", "ipc"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["module", "dict"])
def test_a_write_to_live_tensors_between_the_reads(write: Any, transport: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, engine = model(), MemoryEngine(zeros())
    with WeightSync(module_of(params) if kind == "module" else params, [engine], transport=transport, timeout=20) as sync:
        sync.push("a")
        move(params)
        sync.push("b")  # by copies straight into its weights
        before = engine.fingerprint()
        between_the_reads(monkeypatch, lambda: write(params))
        if transport == "gloo":
            with pytest.raises(SourceError, match="while they were copied; no engine was touched"):
                sync.push("torn")
            assert (engine.fingerprint(), engine.version) == (before, "b")
        else:
            with pytest.raises(DigestMismatch, match=r"layers\.\d"):
                sync.push("torn")
            assert engine.version == "b"
            with pytest.raises(EngineDirty):
                engine.generate([1], 1)
        sync.push("c")
    assert same(engine, {name: param.detach() for name, param in params.items()})
    assert engine.generate([1], 1)


def move(params: Mapping[str, nn.Parameter]) -> None:
    for param in params.values():
        param.data.add_(1)


def test_over_nccl_the_error_says_what_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    params, engine = model(), MemoryEngine(zeros())
    with WeightSync(params, [engine], transport="nccl", timeout=20) as sync:
        between_the_reads(monkeypatch, lambda: params[NAMES[2]].data[3].add_(1))
        with pytest.raises(DigestMismatch, match=r"changed its weights while they were sent \(layers\.2\.weight was read twice") as caught:
            sync.push("torn")
        assert "between optimizer steps" in str(caught.value)
        sync.push("b")


@pytest.mark.parametrize("transport", ["gloo", "nccl", "ipc"])
def test_what_is_cast_and_gathered_from_strides_on_the_way_is_read_twice_too(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {name: param.detach() for name, param in model().items()}
    params[NAMES[2]] = params[NAMES[2]].t()
    source, engine = Second(params), MemoryEngine({name: value.bfloat16() for name, value in zeros().items()})
    with WeightSync(source, [engine], transport=transport, cast=True) as sync:
        assert fails(sync, "torn")
        assert engine.version is None
        sync.push("b")
    assert same(engine, {name: value.bfloat16() for name, value in params.items()})


class Second(Trainer):
    """Writes before its second read, to a tensor that lies transposed."""

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        self.params: Any = params
        self.reads = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.reads += 1
        if self.reads == 2:
            self.params[NAMES[2]].numpy()[5, 7] = 9.0
        yield from self.params.items()


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
@pytest.mark.parametrize("kind", ["mapping", "source"])
def test_a_source_that_fills_one_buffer_sends_every_tensor(transport: Any, kind: str) -> None:
    """Two buckets are under way at a time, and a bucket has several tensors."""
    weights = SCRATCH if kind == "mapping" else LARGE
    engine = MemoryEngine({name: torch.zeros_like(value) for name, value in weights.items()})
    with WeightSync(Scratch(weights) if kind == "mapping" else ScratchSource(weights), [engine], transport=transport, timeout=20) as sync:
        for version in "abc":
            assert sync.push(version).tensors == 3
            assert same(engine, weights)


def test_a_source_that_fills_one_buffer_cannot_be_pulled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MemoryEngine({name: torch.zeros_like(value) for name, value in SCRATCH.items()})
    with WeightSync(ScratchSource(SCRATCH), [engine], timeout=20) as sync:
        receipt = sync.push("a")
    assert same(engine, SCRATCH)
    assert receipt.transport == "nccl"
    assert "not ipc, because layers.0.weight and layers.1.weight were given in the same memory" in receipt.why


def test_tensors_of_another_source_are_pulled_where_they_lie() -> None:
    """What it gives the second time lies where it lay."""
    source, engine = Trainer(WRITES[0], 9, 9), MemoryEngine(zeros())
    with WeightSync(source, [engine], transport="ipc") as sync:
        for version in "abc":
            move(source.params)
            sync.push(version)
            assert engine.fingerprint() == source.state()


@pytest.mark.parametrize("transport", ["gloo", "nccl", "ipc"])
@pytest.mark.parametrize("write", WRITES)
def test_catch_up_brings_the_version_that_it_names_or_none(write: Any, transport: Any) -> None:
    params, one, late = model(), MemoryEngine(zeros(), name="one"), MemoryEngine(zeros(), name="late")
    with WeightSync(params, [one], transport=transport, timeout=20) as sync:
        sync.push("a")
        again = MemoryEngine(zeros(), name="again")
        sync.catch_up(again)
        assert (again.fingerprint(), again.version) == (one.fingerprint(), "a")
        write(params)
        before = late.fingerprint()
        with pytest.raises(VersionConflict, match=r"no current version to catch up with|no longer those of 'a'") as caught:
            sync.catch_up(late)
        assert "push" in str(caught.value)
        assert (late.fingerprint(), late.version, late.refusal) == (before, None, None)
        sync.push("b")
    assert one.fingerprint() == again.fingerprint() == late.fingerprint() == MemoryEngine(dict(params)).fingerprint()
