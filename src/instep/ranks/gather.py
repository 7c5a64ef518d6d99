"""A stretch of a run brought together in rank 0, over a private group of the trainer's ranks.

Rank 0 asks for one stretch, has all of it, and asks for the next when there is room. So no rank is further than what was asked for, and
none holds more than what it gives of one stretch; rank 0 holds one such part beside the stretch.
"""

from __future__ import annotations

import uuid

import msgspec
import torch

from instep.ranks.channel import Channel
from instep.ranks.run import Memory, Run, packed, read
from instep.transport.group import Group, find


class Join(msgspec.Struct, frozen=True):
    key: str
    backend: str


class Stretch(msgspec.Struct, frozen=True):
    """Bytes `low` to `high` of one of the runs of a trainer: of its checkpoint tensors, or of the live tensors that some are made of."""

    parts: bool
    low: int
    high: int


class Meeting:
    """The group of the trainer's ranks, made when it is first needed and again after a failure."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.group: Group | None = None
        self.room = torch.empty(0, dtype=torch.uint8)

    def ask_all(self, device: torch.device) -> Group:
        """Rank 0: the group, with every rank in it."""
        if self.group is None or self.group.broken:
            join = Join(uuid.uuid4().hex, "nccl" if device.type == "cuda" else "gloo")
            self.channel.tell("join", join)
            self.enter(join, device)
            self.channel.collect()
        assert self.group is not None
        return self.group

    def enter(self, join: Join, device: torch.device) -> None:
        self.close()
        channel = self.channel
        store = find(*channel.address, channel.timeout)
        place = device if join.backend == "nccl" else torch.device("cpu")
        self.group = Group(join.backend, store, join.key, channel.rank, channel.size, place, channel.timeout)

    def buffer(self, size: int) -> torch.Tensor:
        assert self.group is not None
        if len(self.room) < size or self.room.device != self.group.device:
            self.room = torch.empty(0, dtype=torch.uint8)  # let go of before
            self.room = torch.empty(size, dtype=torch.uint8, device=self.group.device)
        return self.room[:size]

    def end(self, reason: str) -> None:
        """Ends everybody's waits in the group."""
        if self.group is not None:
            self.group.give_up(reason)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group, self.room = None, torch.empty(0, dtype=torch.uint8)


def give(meeting: Meeting, run: Run, memory: Memory, low: int, high: int) -> None:
    """A rank that follows: sends what it gives of bytes `low` to `high`."""
    group, rank = meeting.group, meeting.channel.rank
    assert group is not None
    size = run.nbytes(rank, low, high)
    if not size:
        return
    room = meeting.buffer(size)
    for _, part, here in packed(run, rank, room, low, high):
        here.copy_(read(memory(part.live), part))
    group.begin(meeting.channel.timeout)
    group.wait(group.send(room, 0))
    group.settle()


def take(meeting: Meeting, run: Run, memory: Memory, room: torch.Tensor, stretch: Stretch) -> None:
    """Rank 0: fills `room` with a stretch of `run`, but for what no rank gives. Returns when it is complete."""
    low, high = stretch.low, stretch.high
    group = meeting.ask_all(room.device)
    meeting.channel.tell("give", stretch)
    run.put(0, memory, room, low, high)
    for rank in range(1, group.size):
        if size := run.nbytes(rank, low, high):
            arrived = meeting.buffer(size)
            group.begin(meeting.channel.timeout)
            group.wait(group.recv(arrived, rank))
            for meta, part, here in packed(run, rank, arrived, low, high):
                run.spot(room, low, meta, part).copy_(here)
            group.settle()
    meeting.channel.collect()
