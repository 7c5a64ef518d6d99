"""What ranks of a trainer send each other of a run: every byte once, in slices that fit, for as few questions as possible."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.plan.buckets import ALIGN, buckets
from instep.plan.shards import Extent, Piece, of_range, pieces, share_out
from instep.protocol import TensorMeta
from instep.ranks.gather import ByteRange, lists
from instep.ranks.run import Run

SHAPES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 700)), min_size=1, max_size=5)
DTYPES = st.sampled_from(["bfloat16", "float32", "uint8"])


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Tensors of several dtypes in two or three ranks, each a range of the flat index space, or columns."""
    tensors = [TensorMeta(f"t{index}", draw(DTYPES), shape) for index, shape in enumerate(draw(SHAPES))]
    ranks = draw(st.integers(2, 3))
    held: list[list[Piece]] = [[] for _ in range(ranks)]
    for meta in tensors:
        by_columns = draw(st.booleans())
        size = meta.shape[1] if by_columns else meta.numel
        cuts = [0, *sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1))), size]
        everything = tuple((0, extent) for extent in meta.shape)
        for rank in range(ranks):
            low, high = cuts[rank : rank + 2]
            view = ((0, meta.shape[0]), (low, high))
            if by_columns and low < high:
                held[rank] += pieces(meta.name, meta.name, everything, [Extent(view, 0, (high - low, 1))])
            elif not by_columns:
                held[rank] += pieces(meta.name, meta.name, everything, of_range(low, high, meta.shape))
    return Run(tensors, dict(enumerate(share_out(tensors, held))))


@given(runs(), st.integers(1, 4), st.integers(1, 3))
def test_every_byte_travels_once_and_no_slice_is_larger_than_it_may_be(run: Run, bucket: int, step: int) -> None:
    room = torch.zeros(run.size, dtype=torch.uint8)
    for low, high in buckets(run.size, bucket * ALIGN):
        for rank in run.given:
            for first, last in run.slices(rank, low, high, step * ALIGN):
                assert low <= first < last <= high
                assert 0 < run.nbytes(rank, first, last) <= step * ALIGN
                for meta, part, _ in run.packed(rank, first, last):
                    run.spot(room, 0, meta, part).view(torch.uint8).add_(1)
    expected = torch.zeros(run.size, dtype=torch.uint8)
    for name, meta in run.metas.items():
        expected[run.offsets[name] : run.offsets[name] + meta.nbytes] = 1
    assert torch.equal(room, expected)


@given(runs(), st.integers(1, 4))
def test_parts_that_are_sent_together_do_not_overlap_and_take_no_more_than_where_they_belong(run: Run, bucket: int) -> None:
    for low, high in buckets(run.size, bucket * ALIGN):
        for rank in run.given:
            end = 0
            for meta, part, at in run.packed(rank, low, high):
                size = meta.nbytes // meta.numel
                assert at >= end
                assert at % size == 0
                end = at + part.rows.numel * size
            assert end == run.nbytes(rank, low, high) <= high - low


@given(st.lists(st.booleans(), max_size=12))
def test_as_many_stretches_as_possible_are_asked_for_at_once(stops: list[bool]) -> None:
    stretches = [ByteRange(False, index * ALIGN, (index + 1) * ALIGN) for index in range(len(stops))]
    found = list(lists(stretches, lambda stretch: stops[stretch.low // ALIGN]))
    assert [stretch for together in found for stretch in together] == stretches
    ends = [together[-1].low // ALIGN for together in found]
    assert ends == [index for index, stop in enumerate(stops) if stop or index == len(stops) - 1]


@given(runs(), st.integers(1, 4))
def test_what_lies_between_tensors_becomes_zero_and_nothing_else_does(run: Run, bucket: int) -> None:
    room = torch.ones(run.size, dtype=torch.uint8)
    for low, high in buckets(run.size, bucket * ALIGN):
        run.clear_gaps(room[low:high], low, high)
    expected = torch.zeros(run.size, dtype=torch.uint8)
    for name, meta in run.metas.items():
        expected[run.offsets[name] : run.offsets[name] + meta.nbytes] = 1
    assert torch.equal(room, expected)


def test_tensors_that_lie_together_are_one_stretch() -> None:
    tensors = [TensorMeta(name, "float32", (10_000,)) for name in "abcde"]
    run = Run(tensors, {0: []})
    step = 2 * ALIGN
    found = [(low, high, [meta.name for meta in metas]) for low, high, metas in run.stretches(["e", "b", "a"])]
    assert found == [(0, 2 * step, ["a", "b"]), (4 * step, 5 * step, ["e"])]
    assert list(run.stretches([])) == []
