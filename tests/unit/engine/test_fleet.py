"""How a fleet asks its engines: how many begin together, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.engine import fleet as rooms
from instep.engine.fleet import Fleet
from instep.engine.member import Member

WEIGHTS = attention(0)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet([MemoryEngine(WEIGHTS, name=f"e{index}") for index in range(12)], "trainer", 20.0)
    yield made
    made.part()


def most_together(fleet: Fleet, seconds: float) -> int:
    """How many of the engines are asked at one time, where each takes `seconds` to answer."""
    now, most = 0, 0

    async def action(_: Member) -> None:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(seconds)
        now -= 1

    found = asyncio.run(fleet.each(fleet.members, action))
    assert len(found) == len(fleet.members)
    return most


def test_a_fleet_asks_a_bounded_number_of_engines_at_one_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "AT_ONCE", 3)
    monkeypatch.setattr(rooms, "BEGUN", 30.0)
    assert most_together(fleet, 0.01) == 3


def test_engines_that_take_long_hold_nobody_up(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait for each other, as those of a broadcast do, are at it in the end."""
    monkeypatch.setattr(rooms, "AT_ONCE", 3)
    monkeypatch.setattr(rooms, "BEGUN", 0.02)
    assert most_together(fleet, 1.0) == 12


def test_a_push_to_many_engines_asks_each_once_for_each_step() -> None:
    engines = [MemoryEngine(WEIGHTS, name=f"e{index}") for index in range(80)]
    source = attention(1)
    with WeightSync(source, engines) as sync:
        sync.push("a")
        for engine in engines:
            engine.calls.clear()
        assert len(sync.push("b").engines) == len(engines)
    for engine in engines:
        once = ["prepare", "pause", "commit", "label", "resume", "abort"]
        assert engine.calls == once
