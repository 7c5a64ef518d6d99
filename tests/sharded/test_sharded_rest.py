"""What else must hold for a trainer of several ranks. Numbers are those of the collection of failure cases."""

from __future__ import annotations

import pytest
from helpers.rank_groups import Seen, played

WRAPS = ("fsdp2", "fsdp1", "zero3", "tp")
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize("case", [played(2, f"nothing-is-gathered/{wrap}") for wrap in WRAPS])
def test_shared_memory_takes_every_byte_from_one_rank_and_gathers_nothing(case: str, found: Seen) -> None:
    assert not any(one["grouped"] for one in found)
    # Each part is rounded up to eight bytes here.
    assert found[0]["nbytes"] <= sum(one["given"] for one in found) <= found[0]["nbytes"] + 8 * 400
    if not case.endswith("/tp"):  # there most is replicated, and rank 0 gives it
        assert max(one["given"] for one in found) < 0.6 * found[0]["nbytes"]


@pytest.mark.parametrize("case", [played(2, "room-for-buckets/rows"), played(2, "room-for-buckets/columns", EXHAUSTIVE)])
def test_a_gathering_broadcast_takes_two_buckets_of_rank_0_and_less_than_one_of_others(case: str, found: Seen) -> None:
    """A third bucket would be seen: what else a push takes is a few megabytes at most."""
    leads, follows = found
    assert leads["nbytes"] > 4 * leads["bucket"], "the model is larger than all that"
    assert leads["bucket"] < leads["most"] <= 2.1 * leads["bucket"]
    assert follows["most"] < 0.5 * leads["bucket"]


@pytest.mark.ranks(2, "cast")
def test_cases_70_and_71_a_trainer_in_float32_sends_what_the_engine_stores(found: Seen) -> None:
    for one in found:
        for way in ("shm", "ipc", "seven", "http"):
            assert one[f"refused {way}"] == "PlanError"
            assert one[f"nbytes {way}"] == 2 * one["numel"]
            assert one[f"same {way}"]
            assert one[f"widened {way}"] == 4 * one["numel"]
            assert one[f"very {way}"]


@pytest.mark.ranks(2, "adapter-changes")
def test_another_adapter_is_seen_by_every_rank(found: Seen) -> None:
    assert all(one["same"] == [True, True, True] for one in found)


@pytest.mark.ranks(2, "zero-inside-gather")
def test_case_75_a_push_inside_of_the_trainers_own_gather_leaves_it_alone(found: Seen) -> None:
    assert all(one == {"still": True, "same": True} for one in found)


@pytest.mark.ranks(2, "late-engine")
def test_an_engine_that_restarts_catches_up(found: Seen) -> None:
    for one in found:
        for way in ("shm", "ipc", "one"):
            assert one[f"early {way}"] == "VersionConflict"
            assert one[f"caught {way}"] is None
            assert one[f"same {way}"]


@pytest.mark.ranks(2, "refusals")
def test_what_several_ranks_cannot_have_is_refused(found: Seen) -> None:
    leads, follows = found
    assert "cannot score a canary" in leads["canary"]
    assert "at least one engine on rank 0" in leads["engines"]
    assert all("weight has placement P" in one["partial"] for one in (leads, follows))


@pytest.mark.parametrize(
    "case", [played(2, "many/100/bfloat16"), *(played(2, f"many/1000/{dtype}", EXHAUSTIVE) for dtype in ("bfloat16", "float32"))]
)
def test_case_79_many_pushes_of_an_adapter_change_no_bit(case: str, found: Seen) -> None:
    assert all(one == {"digests": 1, "same": True} for one in found)


@pytest.mark.ranks(2, "pairs")
def test_pairs_that_all_ranks_gather_are_read_to_the_end_on_every_rank(found: Seen) -> None:
    assert all(one["held same"] and one["streamed same"] and one["read"] for one in found)
    assert [one["refused"] for one in found] == ["VersionConflict"] * 2
    assert found[0]["streamed"] == found[1]["streamed"] != found[0]["held"]
