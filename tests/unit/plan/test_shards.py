"""Pieces of sharded tensors against sets of indices, for random shapes, shards, views and buckets."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import SourceError
from instep.plan.region import indices
from instep.plan.shards import Extent, Piece, everything, of_intervals, of_range, ordered_box, pieces, share_out
from instep.protocol import Region, TensorMeta

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


def moved(found: list[Piece], memory: np.ndarray, size: int) -> np.ndarray:
    """The tensor that the pieces make of a rank's memory; -1 where they write nothing. No element is written twice."""
    made = np.full(size, -1)
    for piece in found:
        to, at = indices(piece.rows.written), indices(piece.rows.read)
        assert (made[to] == -1).all()
        assert len(np.unique(to)) == len(to)
        made[to] = memory[at]
    return made


@given(st.data(), SHAPES)
def test_a_range_of_the_flat_index_space(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    at = data.draw(st.integers(0, 5))
    memory = np.concatenate([np.full(at, -2), np.arange(low, high)])
    found = list(pieces("t", "t", tuple((0, n) for n in shape), of_range(low, high, shape, at)))
    expected = np.full(size, -1)
    expected[low:high] = np.arange(low, high)
    assert (moved(found, memory, size) == expected).all()
    assert len(found) <= 2 * max(1, len(shape)) + 1


def splits(data: st.DataObject, size: int, parts: int) -> list[tuple[int, int]]:
    edges = sorted(data.draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return list(pairwise([0, *edges, size]))


@given(st.data(), SHAPES.filter(len))
def test_a_grid_of_ranks_gives_every_element_of_a_view_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Uneven shards along every dimension, some of them of several intervals as FSDP over TP makes them; views are boxes."""
    flat = np.arange(math.prod(shape)).reshape(shape)
    view = []
    for n in shape:
        low = data.draw(st.integers(0, n - 1))
        view.append((low, data.draw(st.integers(low + 1, n))))
    wanted = flat[tuple(slice(*one) for one in view)].reshape(-1)
    per_dim = []
    for n in shape:
        parts = splits(data, n, 4)
        per_dim.append([[parts[0], parts[2]], [parts[1], parts[3]]])  # two ranks along each dimension, interleaved
    held = []
    made = np.full(len(wanted), -1)
    for chosen in np.ndindex(*[2] * len(shape)):
        intervals = [[one for one in per_dim[d][rank] if one[0] < one[1]] for d, rank in enumerate(chosen)]
        grid = np.ix_(*[np.concatenate([np.arange(*one) for one in some] or [np.arange(0)]) for some in intervals])
        held.append(list(pieces("t", "t", tuple(view), of_intervals(intervals) if all(intervals) else [])))
        part = moved(held[-1], flat[grid].reshape(-1), len(wanted))
        assert (made[part >= 0] == -1).all()
        made = np.where(part >= 0, part, made)
    assert (made == wanted).all()
    shared = share_out([TensorMeta("t", "int64", tuple(high - low for low, high in view))], held)
    assert sum(piece.rows.numel for rank in shared for piece in rank) == len(wanted)


@given(st.data(), SHAPES.filter(len))
def test_buckets_cut_pieces_at_their_edges(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    intervals = [[(0, max(1, n // 2))] for n in shape]
    found = list(pieces("t", "t", tuple((0, n) for n in shape), of_intervals(intervals)))
    edges = [(low, high) for low, high in splits(data, size, data.draw(st.integers(1, 5))) if low < high]
    for low, high in edges:
        for piece in found:
            for part in piece.rows.within(low, high):
                assert low <= indices(part.written).min() <= indices(part.written).max() < high
    parts = [Piece("t", "t", part) for low, high in edges for piece in found for part in piece.rows.within(low, high)]
    memory = np.arange(100, 100 + size)
    assert (moved(parts, memory, size) == moved(found, memory, size)).all()


@given(st.data(), SHAPES.filter(len))
def test_a_view_is_a_box_only_in_its_own_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    chosen = tensor[tuple(slice(data.draw(st.integers(0, n - 1)), n) for n in shape)]
    turned = chosen.permute(*data.draw(st.permutations(range(len(shape)))))
    box = ordered_box(Region(int(turned.storage_offset()), tuple(turned.shape), turned.stride()), shape)
    same = turned.reshape(-1).tolist() == chosen.reshape(-1).tolist()
    assert (box is not None) == same
    if box is not None:
        assert tensor[tuple(slice(*one) for one in box)].reshape(-1).tolist() == turned.reshape(-1).tolist()


def whole(rows: int = 4) -> list[Piece]:
    return list(pieces("t", "t", ((0, rows),), everything((rows,))))


def part(low: int, high: int) -> list[Piece]:
    return list(pieces("t", "t", ((0, 4),), of_range(low, high, (4,))))


META = TensorMeta("t", "float32", (4,))


def test_of_replicas_the_first_rank_gives() -> None:
    assert share_out([META], [whole(), whole()]) == [whole(), []]
    assert share_out([META], [part(0, 3), part(3, 4), part(0, 3), part(3, 4)]) == [part(0, 3), part(3, 4), [], []]


def test_an_element_that_lies_nowhere_is_an_error() -> None:
    with pytest.raises(SourceError, match="hold 3 of the 4 elements of t"):
        share_out([META], [part(0, 1), part(2, 4)])


def test_parts_that_overlap_are_an_error() -> None:
    with pytest.raises(SourceError, match="parts of t that overlap"):
        share_out([META], [part(0, 2), part(1, 3)])
    with pytest.raises(SourceError, match="parts of t that overlap"):
        share_out([META], [part(0, 3), part(2, 4)])


def test_an_extent_says_where_a_box_lies() -> None:
    assert of_range(3, 9, (4, 3), at=7) == [Extent(((1, 3), (0, 3)), 7, (3, 1))]
    assert of_intervals([[(0, 1), (2, 3)], [(1, 3)]]) == [Extent(((0, 1), (1, 3)), 0, (2, 1)), Extent(((2, 3), (1, 3)), 2, (2, 1))]
