"""Lists of stretches in rank 0, over a group and a device that are made up: how far it runs ahead, and how a list ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import SourceError
from instep.plan.buckets import ALIGN
from instep.protocol import TensorMeta
from instep.ranks.gather import AHEAD, ByteRange, Meeting, take_all
from instep.ranks.run import Run

CPU = torch.device("cpu")
RUN = Run([TensorMeta(name, "uint8", (ALIGN,)) for name in "abc"], {0: []})
MEMORY: Any = dict.__getitem__
STRETCHES = [ByteRange(False, at, at + ALIGN) for at in range(0, RUN.size, ALIGN)]


class Device:
    """A group with one rank in it, whose device does nothing before somebody waits for it."""

    size, broken, device = 1, None, CPU

    def __init__(self, *, dead: bool = False) -> None:
        self.asked, self.done, self.dead = 0, 0, dead
        self.said: list[str] = []

    def mark(self) -> Callable[[], bool]:
        asked = self.asked
        return lambda: self.done >= asked

    def begin(self, timeout: float) -> None: ...

    def settle(self, mark: Callable[[], bool]) -> None:
        while not mark():
            self.done += not self.dead

    def give_up(self, reason: str) -> None:
        self.said.append(reason)

    def close(self) -> None:
        self.said.append("closed")


class Asking:
    """A channel to ranks that answer, unless one has ended after so many looks."""

    rank, size, timeout = 0, 2, 1.0

    def __init__(self, looks: int = 1 << 30) -> None:
        self.log: list[str] = []
        self.looks = looks

    def tell(self, what: str, body: Any) -> None:
        self.log.append(f"{what} {len(body)}")

    def collect(self) -> None:
        self.log.append("answered")

    def miss(self, ranks: Any) -> None:
        self.looks -= 1
        if self.looks < 0:
            raise SourceError("trainer rank 1 of 2 is gone")


def meeting(device: Device, channel: Asking) -> Any:
    found: Any = Meeting(channel)  # type: ignore[arg-type]
    found.group = device
    return found


@given(st.lists(st.integers(0, 3 * AHEAD // 2), max_size=40))
def test_no_more_is_asked_of_a_device_than_it_takes(batches: list[int]) -> None:
    device = Device()
    here = meeting(device, Asking())
    for copies in batches:
        here.pace(copies)
        assert device.done == device.asked or device.asked - device.done + copies <= AHEAD
        device.asked += copies
    here.finish()
    assert device.done == device.asked


def test_a_rank_that_ends_is_seen_while_a_device_waits_for_it() -> None:
    device = Device(dead=True)
    here = meeting(device, Asking(looks=5))
    device.asked = 1
    with pytest.raises(SourceError, match="rank 1 of 2 is gone"), here.engaged():
        here.finish()
    assert device.said == ["trainer rank 0: trainer rank 1 of 2 is gone", "closed"]
    assert here.group is None


def test_one_question_brings_all_stretches_and_its_answer_is_there_before_the_last() -> None:
    device, channel = Device(), Asking()
    rooms = [torch.empty(ALIGN, dtype=torch.uint8) for _ in STRETCHES]
    for room, taken in zip(rooms, take_all(meeting(device, channel), RUN, MEMORY, CPU, STRETCHES, iter(rooms)), strict=True):
        assert room is taken
        channel.log.append("taken")
    assert channel.log == ["give 3", "taken", "taken", "answered", "taken"]
    assert device.said == []


def test_a_list_that_rank_0_leaves_in_the_middle_ends_the_waits_of_all() -> None:
    device = Device()
    here = meeting(device, Asking())
    taken: Any = take_all(here, RUN, MEMORY, CPU, STRETCHES, (torch.empty(ALIGN, dtype=torch.uint8) for _ in STRETCHES))
    next(taken)
    taken.close()
    assert device.said == ["trainer rank 0: it was stopped", "closed"]
    assert here.group is None
