"""Strided rows against a reference that looks at one unit after the other, for random rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.plan.region import indices
from instep.plan.rows import Rows, all_rows, common, contiguous, of_place, rows_of
from instep.protocol import Place, Region, TensorMeta

SPACE = 160
"""Units of the tensor."""


@st.composite
def rows(draw: st.DrawFn, stride: int | None = None) -> Rows:
    length = draw(st.integers(1, 9 if stride is None else stride))
    stride = stride or draw(st.integers(length, 14))
    places = [number for _ in range(2) for number in (draw(st.integers(0, 50)), draw(st.integers(length, 20)))]
    return Rows(draw(st.integers(1, 8)), length, draw(st.integers(0, SPACE - 14 * 8)), stride, *places)


def units(some: Rows) -> list[tuple[int, int, int]]:
    """Where each unit lies: in the tensor, in memory, and at the target."""
    strides = (some.stride, some.place_stride, some.target_stride)
    return [
        tuple(first + row * stride + column for first, stride in zip((some.at, some.place, some.target), strides, strict=True))
        for row, column in np.ndindex(some.count, some.length)
    ]


def once(found: Iterable[Rows]) -> list[tuple[int, int, int]]:
    """The units of all of them, in the tensor's order. None is there twice."""
    units_of = sorted(unit for some in found for unit in units(some))
    assert len({at for at, _, _ in units_of}) == len(units_of)
    return units_of


@given(rows(), st.integers(0, SPACE), st.integers(0, 60))
def test_an_interval_of_the_tensor_has_each_unit_once(some: Rows, low: int, length: int) -> None:
    wanted = [unit for unit in units(some) if low <= unit[0] < low + length]
    assert once(some.within(low, low + length)) == sorted(wanted)


@given(rows(), st.integers(0, SPACE), st.integers(0, 60))
def test_an_interval_of_the_memory_has_each_unit_once(some: Rows, low: int, length: int) -> None:
    wanted = [unit for unit in units(some) if low <= unit[1] < low + length]
    assert once(some.stored(low, low + length)) == sorted(wanted)


@given(rows(), st.integers(1, 23))
def test_intervals_side_by_side_make_up_the_rows_in_few_parts(some: Rows, size: int) -> None:
    cuts = [list(some.stored(low, low + size)) for low in range(0, 250, size)]
    assert once(part for parts in cuts for part in parts) == sorted(units(some))
    assert max(map(len, cuts)) <= 3


def test_no_rows_are_in_no_interval() -> None:
    assert not list(Rows(0, 3, 0, 3, 0, 3).within(0, 9))
    assert not list(Rows(3, 0, 0, 1, 0, 1).stored(0, 9))


def check(source: Rows, target: Rows) -> int:
    """How many copies it took."""
    there = {at: place for at, place, _ in units(target)}
    found = list(common(source, target))
    assert once(found) == sorted((at, place, there[at]) for at, place, _ in units(source) if at in there)
    return len(found)


@given(rows(), rows())
def test_every_unit_of_both_is_copied_once(a: Rows, b: Rows) -> None:
    check(a, b)


@given(st.data(), st.integers(1, 14))
def test_rows_of_one_stride_take_at_most_two_copies(data: st.DataObject, stride: int) -> None:
    """However many rows there are: columns of a matrix whose columns are sharded."""
    assert check(data.draw(rows(stride)), data.draw(rows(stride))) <= 2


@given(rows(), st.integers(0, 150), st.integers(1, 60))
def test_a_contiguous_part_takes_at_most_three_copies(a: Rows, low: int, length: int) -> None:
    assert check(a, contiguous(length, 7, low)) <= 3
    assert check(contiguous(length, 7, low), a) <= 3


def test_in_words() -> None:
    assert contiguous(12, 5).in_words(2, 0) is None, "an odd place"
    assert contiguous(12, 4).in_words(2, 800) == Rows(1, 3, 0, 3, 101, 3)
    assert Rows(5, 4, 2, 8, 0, 4).in_words(2, 0) is None, "rows begin within a word"
    assert Rows(5, 2, 4, 8, 0, 4).in_words(2, 0) is None, "rows end within a word"
    assert Rows(5, 4, 4, 8, 0, 4).in_words(2, 1600) == Rows(5, 1, 1, 2, 200, 1)


@given(rows(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 40))
def test_words_have_the_bytes_of_the_units_that_they_were(some: Rows, size: int, address: int) -> None:
    found = some.in_words(size, address)
    if found is not None:
        bytes_of = [(size * at + byte, address + size * place + byte) for at, place, _ in units(some) for byte in range(size)]
        assert sorted((8 * at + byte, 8 * place + byte) for at, place, _ in units(found) for byte in range(8)) == sorted(bytes_of)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 13])
def test_the_last_word_may_reach_past_the_end(nbytes: int) -> None:
    assert contiguous(nbytes, 64, 8, 128).in_padded_words() == contiguous(-(-nbytes // 8), 8, 1, 16)


def test_a_place_is_the_rows_that_it_tells_of() -> None:
    place = Place(Region(4, (3, 8), (16, 1)), 0, 24, 12)
    assert of_place(place, TensorMeta("w", "bfloat16", (3, 16)), 800) == Rows(3, 2, 1, 4, 103, 3)


@given(st.data(), st.lists(st.integers(1, 4), max_size=4))
def test_regions_of_one_shape_are_rows_of_as_many_strides_as_they_take(data: st.DataObject, shape: list[int]) -> None:
    strides = []
    for _ in range(2):
        step, steps = 1, []
        for size in reversed(shape):
            steps.append(step)
            step = step * size + (data.draw(st.integers(0, 3)) if step * size > 1 else 0)
        strides.append(tuple(reversed(steps)))
    tensor, memory = Region(2, tuple(shape), strides[0]), Region(5, tuple(shape), strides[1])
    wanted = sorted(zip(indices(tensor).tolist(), indices(memory).tolist(), strict=True))
    found = list(all_rows(tensor, memory))
    assert [(at, place) for at, place, _ in once(found)] == wanted
    assert (rows_of(tensor, memory) is not None) == (len(found) == 1)
