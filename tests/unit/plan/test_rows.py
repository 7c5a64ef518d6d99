"""What two strided parts of a tensor have in common, against sets of indices, for random rows of both."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from instep.plan.rows import Rows, common, contiguous

SPACE = 160
"""Elements of the tensor."""


@st.composite
def rows(draw: st.DrawFn, stride: int | None = None) -> Rows:
    length = draw(st.integers(1, 9 if stride is None else stride))
    stride = stride or draw(st.integers(length, 14))
    count = draw(st.integers(1, 8))
    at = draw(st.integers(0, SPACE - 14 * 8))
    return Rows(count, length, at, stride, draw(st.integers(0, 50)), draw(st.integers(length, 20)))


def places(some: Rows) -> dict[int, int]:
    """Where each element of the tensor lies."""
    found = {}
    for row, column in np.ndindex(some.count, some.length):
        found[some.at + row * some.stride + column] = some.place + row * some.place_stride + column
    assert len(found) == some.count * some.length
    return found


def check(a: Rows, b: Rows) -> int:
    """How many pairs of rows it took."""
    wanted = {at: (place, places(b)[at]) for at, place in places(a).items() if at in places(b)}
    found: dict[int, tuple[int, int]] = {}
    pairs = list(common(a, b))
    for mine, theirs in pairs:
        assert (mine.count, mine.length, mine.at) == (theirs.count, theirs.length, theirs.at)
        here, there = places(mine), places(theirs)
        assert here.keys() == there.keys()
        assert not found.keys() & here.keys()
        found |= {at: (here[at], there[at]) for at in here}
    assert found == wanted
    return len(pairs)


@given(rows(), rows())
def test_every_element_of_both_is_there_once(a: Rows, b: Rows) -> None:
    check(a, b)


@given(st.data(), st.integers(1, 14))
def test_rows_of_one_stride_take_at_most_two_pairs(data: st.DataObject, stride: int) -> None:
    """However many rows there are: columns of a matrix whose columns are sharded."""
    assert check(data.draw(rows(stride)), data.draw(rows(stride))) <= 2


@given(rows(), st.integers(0, 150), st.integers(1, 60))
def test_a_contiguous_part_takes_at_most_three_pairs(a: Rows, low: int, length: int) -> None:
    run = Rows(1, length, low, length, 7, length)
    assert check(a, run) <= 3
    assert check(run, a) <= 3


def test_in_words() -> None:
    assert contiguous(12, 5).in_words(2, 0) is None, "an odd place"
    assert contiguous(12, 4).in_words(2, 800) == Rows(1, 3, 0, 3, 101, 3)
    assert Rows(5, 4, 2, 8, 0, 4).in_words(2, 0) is None, "rows begin within a word"
    assert Rows(5, 2, 4, 8, 0, 4).in_words(2, 0) is None, "rows end within a word"
    assert Rows(5, 4, 4, 8, 0, 4).in_words(2, 1600) == Rows(5, 1, 1, 2, 200, 1)
