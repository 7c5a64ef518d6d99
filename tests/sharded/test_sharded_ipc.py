"""CUDA IPC from several ranks, whose processes' memory stands for their cards' (`pretend_cuda.py`): what is read, from whom, and when."""

from __future__ import annotations

import pytest
from helpers.rank_groups import Seen, played

WRAPS = ("fsdp2", "fsdp2-columns", "fsdp1", "zero3", "tp")


@pytest.mark.parametrize("case", [played(size, "ipc-uneven") for size in (2, 3)])
def test_shards_of_any_size_arrive_and_only_those_that_cut_a_word_are_brought_together(case: str, found: Seen) -> None:
    assert found[0]["same"] == [True] * 4
    assert found[0]["staged"] == found[0]["wanted"]


@pytest.mark.parametrize("case", [played(2, f"ipc-bytes-read/{wrap}") for wrap in WRAPS])
def test_workers_read_what_they_hold_and_nothing_is_gathered(case: str, found: Seen) -> None:
    assert found[0]["pulled"] == found[0]["held"] > 0
    assert found[0]["direct"] > 10
    assert not any(one["grouped"] for one in found)


@pytest.mark.parametrize("case", [played(size, "ipc-moves") for size in (2, 3)])
def test_shards_that_move_are_found_and_those_that_stay_are_not_laid_out_anew(case: str, found: Seen) -> None:
    for one in found:
        assert one["same"] == [True] * 7
    *_, stays, last, everything, again = zip(*(one["made"] for one in found), strict=True)
    idle = (3, *[0] * (len(found) - 1))  # the engine pulls as many tensors whole, because they are no whole words
    assert stays == again == idle
    assert last[0] > 3
    assert last[1:] == (*idle[2:], 1), "other ranks need nothing new"
    assert all(one > zero for one, zero in zip(everything, idle, strict=True))


@pytest.mark.ranks(2, "ipc-not-finite")
def test_numbers_that_are_not_finite_are_found_in_every_rank(found: Seen) -> None:
    assert [one["found"] for one in found] == [[["even"], ["uneven"], ["vector"], []]] * 2


@pytest.mark.parametrize("case", [played(size, "ipc-share-fails") for size in (2, 3)])
def test_a_rank_whose_memory_cannot_be_shared_makes_another_transport_bring_the_version(case: str, found: Seen) -> None:
    rank = len(found) - 1
    for one in found:
        assert one["transport"] == "shm"
        assert f"not ipc, because trainer rank {rank}: the trainer's GPU memory cannot be shared: " in one["why"]
        assert one["after"] == "ipc"
    assert found[0]["same"]


@pytest.mark.parametrize("case", [played(3, "ipc-rank-dies/expose"), played(2, "ipc-rank-dies/sums")])
def test_a_rank_that_dies_is_named_at_once(case: str, found: Seen) -> None:
    """Sums are told before anybody pulls: nothing has been touched."""
    assert found[-1] is None
    size, found = len(found), found[:-1]
    assert all(one["seconds"] < 20 for one in found)
    assert all(f"trainer rank {size - 1} of {size} is gone: its process has ended" in one["error"] for one in found)
    assert not found[0]["refuses"]


@pytest.mark.ranks(2, "ipc-engine-is-slow")
def test_no_rank_steps_while_workers_read(found: Seen) -> None:
    pulled = found[0]["pulled"]
    assert len(pulled) == 2
    for one in found:
        (error, returned), (after_failing, returned_later) = one["returned"]
        assert error is None
        assert "told to fail at label" in after_failing
        assert returned > pulled[0]
        assert returned_later > pulled[1]
