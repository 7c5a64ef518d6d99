"""Versions of tensors that lie where they lay: copied without asking for a tensor each, and proved all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.digest import BLOCK_BYTES, Bytes, digest
from instep.errors import SourceError
from instep.plan.packed import packed
from instep.protocol import TensorMeta, dtype_name
from instep.transport import Placed, addresses
from instep.transport.addresses import Strips
from instep.transport.copying import Copier

SIZES = [1, 3, 64, BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4, 3 * BLOCK_BYTES]


class Trainer:
    """Tensors of many sizes, halves of one another's memory among them."""

    def __init__(self) -> None:
        pair = torch.randn(2, 40)
        self.tensors = {f"t{size}": torch.randn(size) for size in SIZES} | {
            "left": pair[0],
            "right": pair[1],
            "half": torch.randn(8).bfloat16(),
        }
        self.asked = 0

    @property
    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(name, dtype_name(value.dtype), tuple(value.shape)) for name, value in self.tensors.items()]

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.tensors.items():
            self.asked += 1
            yield name, value.detach()

    def step(self) -> None:
        for value in self.tensors.values():
            value.neg_().add_(1)


class Run:
    """Versions copied one after the other, each into memory that is dirty at first."""

    def __init__(self, trainer: Trainer, pool: ThreadPoolExecutor) -> None:
        self.trainer, self.copier = trainer, Copier(pool)

    def copied(self, place: object, **cast: str) -> Bytes:
        """Copies a version and checks it. cast: dtypes to send."""
        trainer = self.trainer
        metas = [TensorMeta(meta.name, cast.get(meta.name, meta.dtype), meta.shape) for meta in trainer.metas]
        view = np.full(packed(metas).size, 7, np.uint8)
        trainer.asked = 0
        digests, flagged = self.copier.copied(view, metas, Placed(trainer.read, trainer.read, stays=True, place=place))
        sent = {meta.name: trainer.tensors[meta.name].to(getattr(torch, meta.dtype)) for meta in metas}
        assert digests == {meta.name: digest(sent[meta.name], meta) for meta in metas}
        assert flagged == tuple(name for name, value in sent.items() if not value.isfinite().all())
        expected = np.zeros(view.size, np.uint8)
        for meta in metas:
            expected[packed(metas).offsets[meta.name] :][: meta.nbytes] = sent[meta.name].contiguous().view(-1).view(torch.uint8).numpy()
        assert np.array_equal(view, expected)
        return view


@pytest.fixture
def run() -> Iterator[Run]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield Run(Trainer(), pool)


def test_what_lies_where_it_lay_is_copied_without_asking_for_it(run: Run) -> None:
    run.copied("here")
    assert run.trainer.asked == 2 * len(run.trainer.tensors), "a first read and a second one"
    for _ in range(2):
        run.trainer.step()
        run.copied("here")
        assert not run.trainer.asked


def move(run: Run) -> dict[str, str]:
    run.trainer.tensors["t64"] = run.trainer.tensors["t64"].clone()
    return {}


def grow(run: Run) -> dict[str, str]:
    run.trainer.tensors["new"] = torch.randn(7)
    return {}


def cast(run: Run) -> dict[str, str]:
    return {"t64": "bfloat16"}


@pytest.mark.parametrize("change", [move, grow, cast], ids=lambda change: change.__name__)
def test_another_list_or_another_place_is_read_anew(run: Run, change: Callable[[Run], dict[str, str]]) -> None:
    run.copied("here")
    run.copied("there" if change is move else "here", **change(run))
    assert run.trainer.asked


def test_a_source_that_cannot_tell_where_its_tensors_lie_is_asked_for_each(run: Run) -> None:
    for _ in range(2):
        run.copied(None)
        assert run.trainer.asked


@pytest.mark.parametrize("name", ["t64", f"t{SIZES[-1]}"], ids=["small", "large"])
def test_memory_that_was_freed_is_not_looked_at(run: Run, name: str) -> None:
    """Though the source says that nothing has moved."""
    run.copied("here")
    run.trainer.tensors[name] = run.trainer.tensors[name] + 1
    run.copied("here")
    assert run.trainer.asked


@pytest.mark.parametrize("name", ["t64", "right", f"t{SIZES[-1]}"])
def test_a_tensor_that_changes_between_the_two_reads_is_named(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run.copied("here")
    places = packed(run.trainer.metas)
    sums = places.with_sums

    def steps(*given: object) -> object:
        run.trainer.tensors[name][-1] += 1
        return sums(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(places, "with_sums", steps)
    with pytest.raises(SourceError, match="changed") as caught:
        run.copied("here")
    assert caught.value.tensor == name
    monkeypatch.undo()
    run.copied("here")
    assert run.trainer.asked, "after a failure"


def test_tensors_that_nobody_else_holds_are_let_go(run: Run) -> None:
    run.copied("here")
    known = run.copier.known
    assert known is not None
    assert known.held() is not None
    run.trainer.tensors.clear()
    assert known.held() is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=12), st.integers(1, 60))
def test_strips_that_are_one_hold_the_same_bytes(found: list[tuple[int, int]], limit: int) -> None:
    """Gaps of zero bytes between strips make some of them one, up to a limit."""
    memory, version = np.arange(600, dtype=np.uint64).view(np.uint8), np.zeros(4800, np.uint8)
    strips, at = [], 0
    for gap, size in found:
        at += gap
        strips.append((at, memory.ctypes.data + at, size))
        at += size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addresses, "SMALL", limit)
        merged = Strips(reversed(strips))
    assert all(size <= max(limit, 40) for _, _, size in merged.strips)
    merged.give(version.ctypes.data)
    expected = np.zeros_like(version)
    for offset, _, size in strips:
        expected[offset : offset + size] = memory[offset : offset + size]
    assert np.array_equal(version, expected)
    assert merged.equal(version.ctypes.data)
    back = np.zeros_like(memory)
    Strips((offset, back.ctypes.data + offset, size) for offset, _, size in strips).take(version.ctypes.data)
    assert np.array_equal(back, expected)
    if strips:
        version[strips[-1][0]] ^= 1
        assert not merged.equal(version.ctypes.data)
