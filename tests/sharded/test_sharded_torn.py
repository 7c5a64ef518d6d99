"""A rank that writes to its weights during a push: what ranks read is of one moment, or no engine is labelled."""

from __future__ import annotations

import pytest
from helpers.rank_groups import Seen, played

BEFORE = [played(2, f"torn/{way}/{model}/{rank}") for way in ("shm", "one", "http") for model in ("llama", "lora") for rank in (0, 1)]
STAGED = [played(2, f"torn/ipc/lora/{rank}") for rank in (0, 1)]
PULLED = [played(2, f"torn/ipc/llama/{rank}") for rank in (0, 1)]


@pytest.mark.parametrize("case", BEFORE)
def test_where_bytes_travel_before_the_commit_the_engine_keeps_what_it_serves(case: str, found: Seen) -> None:
    for one in found:
        assert one["kind"] == "SourceError", one
        assert "changed its weights while they were copied; no engine was touched" in one["error"]
        assert one["after"] is None
        assert one["same"]
    assert (found[0]["served"], found[0]["refused"]) == ("v0", None)
    if case.endswith("/1"):
        assert "trainer rank 1: " in found[0]["error"]


@pytest.mark.parametrize("case", STAGED)
def test_what_is_brought_together_in_rank_0_is_of_one_moment(case: str, found: Seen) -> None:
    assert all(one["kind"] in ("SourceError", "DigestMismatch") and one["after"] is None and one["same"] for one in found)


@pytest.mark.parametrize("case", PULLED)
def test_what_workers_pull_is_what_the_ranks_had_before(case: str, found: Seen) -> None:
    assert all(one["kind"] == "DigestMismatch" and one["after"] is None and one["same"] for one in found)
    assert found[0]["refused"]
