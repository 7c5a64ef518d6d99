"""A stretch of a run brought together in rank 0, over a private group of the trainer's ranks.

Rank 0 asks for one stretch, has all of it, and asks for the next when there is room: no rank is further than what was asked for. What a
rank gives of a stretch travels in slices, because it cannot arrive where it belongs: parts are rows, sent together. While rank 0 puts
one slice in its place the other rank packs the next. So both hold one slice beside the stretch.
"""

from __future__ import annotations

import uuid

import msgspec
import torch

from instep.errors import TransportError
from instep.plan.shards import Piece
from instep.protocol import ITEM_BYTES, TensorMeta
from instep.ranks.channel import Channel
from instep.ranks.run import Memory, Run, read
from instep.transport.group import Group, find

MOMENT = 0.5
"""Seconds: the connections of a process end a little before it is known that it has ended."""


class Join(msgspec.Struct, frozen=True):
    key: str
    backend: str


class Stretch(msgspec.Struct, frozen=True):
    """Bytes `low` to `high` of one of the runs of a trainer: of its checkpoint tensors, or of the live tensors that some are made of.

    step: the most bytes that travel at once.
    """

    parts: bool
    low: int
    high: int
    step: int = 4 << 20


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


def give(meeting: Meeting, run: Run, memory: Memory, stretch: Stretch) -> None:
    """A rank that follows: sends what it gives of a stretch."""
    group, rank = meeting.group, meeting.channel.rank
    assert group is not None
    for low, high in run.slices(rank, stretch.low, stretch.high, stretch.step):
        room = meeting.buffer(run.nbytes(rank, low, high))
        for meta, part, at in run.packed(rank, low, high):
            _in(room, meta, part, at).copy_(read(memory(part.live), part))
        group.begin(meeting.channel.timeout)
        group.wait(group.send(room, 0))
        group.settle()


def take(meeting: Meeting, run: Run, memory: Memory, room: torch.Tensor, stretch: Stretch) -> None:
    """Rank 0: fills `room` with a stretch of `run`, but for what no rank gives. Returns when it is complete."""
    group = meeting.ask_all(room.device)
    meeting.channel.tell("give", stretch)
    run.put(0, memory, room, stretch.low, stretch.high)
    for rank in range(1, group.size):
        for low, high in run.slices(rank, stretch.low, stretch.high, stretch.step):
            arrived = meeting.buffer(run.nbytes(rank, low, high))
            group.begin(meeting.channel.timeout)
            try:
                group.wait(group.recv(arrived, rank))
            except TransportError:
                meeting.channel.miss([rank], MOMENT)
                raise
            for meta, part, at in run.packed(rank, low, high):
                run.spot(room, stretch.low, meta, part).copy_(_in(arrived, meta, part, at))
            group.settle()
    meeting.channel.collect()


def _in(room: torch.Tensor, meta: TensorMeta, part: Piece, at: int) -> torch.Tensor:
    """Where a part lies among others that are sent together."""
    return room[at : at + part.numel * ITEM_BYTES[meta.dtype]].view(getattr(torch, meta.dtype)).view(part.rows, part.row)
