"""What goes wrong on one rank or one engine is told on every rank, in time, and the engine serves what it served. Numbers are those of the
collection of failure cases."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers.rank_groups import Seen, played

BLOCK = 32 << 10


def healed(found: Seen, served: str = "v0") -> None:
    """The engine served the old version, and the next push worked."""
    assert found[0]["served"] == served
    assert [one["after"] for one in found] == [None] * len(found)
    assert found[0]["serves"] == "after"


@pytest.mark.parametrize("case", [played(2, "engine-fails/shm"), played(2, "engine-fails/one")])
def test_an_engine_that_fails_is_told_on_every_rank(case: str, found: Seen) -> None:
    assert all("memory was told to fail at prepare" in one["error"] and one["kind"] == found[0]["kind"] for one in found)
    assert all("still serves v0" in one["error"] or "it served v0" in one["error"] for one in found)
    healed(found)


@pytest.mark.parametrize("case", [played(2, "rank-fails/shm/0"), played(2, "rank-fails/one/0"), played(3, "rank-fails/one/5")])
def test_a_rank_that_cannot_read_its_source_is_told_on_every_rank(case: str, found: Seen) -> None:
    assert all("trainer rank 1: " in one["error"] and "offloaded shard is gone" in one["error"] for one in found)
    assert all(one["seconds"] < 20 for one in found)
    healed(found)


@pytest.mark.parametrize(
    "case", [played(size, f"engine-fails-midway/{model}") for size, model in ((2, "llama"), (3, "llama"), (2, "lora"))]
)
def test_an_engine_that_fails_in_the_middle_of_a_broadcast_ends_what_ranks_are_giving(case: str, found: Seen) -> None:
    assert all("the engine's memory is full" in one["error"] for one in found)
    assert all(one["seconds"] < 20 for one in found), "the deadline is a minute"
    if case.endswith("llama"):
        assert found[0]["asked"] == 1
        assert all(5 <= one["given"] < 12 for one in found[1:]), "of one list, whose rest is left"
    healed(found)
    assert found[0]["same"]


@pytest.mark.ranks(2, "engine-fails-while-a-rank-is-slow")
def test_rank_0_hears_that_the_engine_has_failed_while_it_waits_for_another_rank(found: Seen) -> None:
    assert all("the engine's memory is full" in one["error"] for one in found)
    (heard,), (gave,) = (one["moments"] for one in found)
    assert heard < gave
    healed(found)


@pytest.mark.ranks(2, "rank-is-absent")
def test_a_rank_that_makes_no_call_is_named_in_time(found: Seen) -> None:
    assert "trainer rank 1 of 2 did not answer 'begin' within 5 s" in found[0]["error"]
    assert found[0]["seconds"] < 15
    healed(found)


@pytest.mark.ranks(2, "leader-is-absent")
def test_a_leader_that_makes_no_call_is_named_in_time(found: Seen) -> None:
    assert "rank 0 of the trainer did not push v1 within 5 s" in found[1]["error"]
    healed(found)


@pytest.mark.ranks(2, "versions-differ")
def test_ranks_that_push_different_versions_are_told_so(found: Seen) -> None:
    assert "trainer rank 1: it makes the call push v2, rank 0 push v1" in found[0]["error"]
    assert "rank 0 of the trainer did not push v2, it made the call push v1 within 5 s" in found[1]["error"]
    healed(found)


@pytest.mark.ranks(2, "rank-is-ahead")
def test_a_rank_that_is_one_call_ahead_is_waited_for(found: Seen) -> None:
    assert "trainer rank 1: it makes the call push after, rank 0 push v1" in found[0]["error"]
    assert found[0]["seconds"] < 15
    healed(found)


@pytest.mark.parametrize("case", [played(3, "rank-dies/one/5"), played(4, "rank-dies/shm/0")])
def test_case_21_a_rank_that_dies_ends_the_push_everywhere_at_once_and_is_named(case: str, found: Seen) -> None:
    """Killed while it gives its part of the sixth bucket, or while it writes to the segment. The deadline is a minute."""
    assert None not in found[:-1]
    assert found[-1] is None
    size, found = len(found), found[:-1]
    assert all(one["seconds"] < 20 for one in found)
    assert {one["error"].splitlines()[0] for one in found} == {f"trainer rank {size - 1} of {size} is gone: its process has ended"}
    assert found[0]["served"] == "v0"


@pytest.mark.parametrize("case", [played(2, "leader-dies/5"), played(3, "leader-dies/5")])
def test_the_end_of_rank_0_is_told_by_every_other_at_once(case: str, found: Seen) -> None:
    """Killed while it takes others' parts of the sixth bucket. The deadline is a minute."""
    assert found[0] is None
    assert all(one["kind"] == "TransportError" and "rank 0 of the trainer is gone" in one["error"] for one in found[1:])
    assert all(one["seconds"] < 20 for one in found[1:])


@pytest.mark.parametrize("case", [played(3, "slow-receiver"), played(4, "slow-receiver")])
def test_cases_2_and_4_all_ranks_stay_within_one_bucket_of_a_slow_receiver(case: str, found: Seen) -> None:
    """Times are of one host's clock. A bucket is sent when it is complete, and two are on their way at most, while all have one list."""
    taken = [(start, end) for what, start, end in found[0]["seen"] if what == "take"]
    received = [start for what, start, _ in found[0]["seen"] if what == "received"]
    assert len(taken) == len(received) > 10
    assert all(before[1] <= after[0] for before, after in pairwise(taken)), "one gather at a time"
    assert all(end <= arrived for (_, end), arrived in zip(taken, received, strict=True)), "complete before it is sent"
    for one in found[1:]:
        given = [(start, end) for what, start, end in one["seen"] if what == "give"]
        assert len(given) == len(taken), "all ranks take part in every gather"
        for mine, whole in zip(given, taken, strict=True):
            assert whole[0] <= mine[1] <= whole[1] + 1, "what is sent is on its way until rank 0 takes it"
    assert all(one["room"] <= BLOCK for one in found), "what is held beside the buckets is no more than one of them"
    healed(found, served="v1")
