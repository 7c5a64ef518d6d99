"""Runs sorted by the buckets that they reach into, against runs that are cut for every bucket."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from instep.digest_cuda import Run
from instep.plan.rows import Rows, contiguous
from instep.receiver.stream import by_bucket, cut_run

BUCKET = 64
BUCKETS = 40


def of(rows: Rows, slot: int = 0) -> Run:
    return Run(rows, slot, 1, "bfloat16")


@st.composite
def runs(draw: st.DrawFn) -> Run:
    count, length = draw(st.integers(0, 6)), draw(st.integers(0, 12))
    stride, place = draw(st.integers(length, 40)), draw(st.integers(0, 60))
    return of(Rows(count, length, 0, stride, place, stride, 1 << 17, draw(st.integers(length, 40))), draw(st.integers(0, 5)))


@given(some=st.lists(runs(), max_size=6))
def test_each_bucket_gets_what_it_gets_of_all_runs(some: list[Run]) -> None:
    sorted_in = by_bucket(some, BUCKET)
    for index in range(BUCKETS):
        low, high = index * BUCKET, (index + 1) * BUCKET
        cut = [part for run in some for part in cut_run(run, low, high, 1 << 10)]
        assert [part for run in sorted_in[index] for part in cut_run(run, low, high, 1 << 10)] == cut


def test_a_run_is_looked_at_only_for_buckets_that_it_reaches_into() -> None:
    one, two = of(contiguous(BUCKET // 8, BUCKET // 8)), of(contiguous(BUCKET // 8, 3 * BUCKET // 8 + 1))
    assert by_bucket([one, two], BUCKET) == {1: [one], 3: [two], 4: [two]}
