"""Gathers stretches of a run in rank 0, over a private group of the trainer's ranks.

Rank 0 asks for a list of stretches and receives them one after the other. Every rank goes through
the list in step with it, because a send ends only when rank 0 has a buffer for it. Ranks answer the
question at the end of the list. What a rank gives of a stretch travels in slices, because it cannot
arrive in its final place: parts are rows, packed together. While rank 0 unpacks one slice the other
rank packs the next. So both hold one slice beside the stretch.

On a GPU nobody waits for a slice: its streams keep the order, and the next ones are asked for
meanwhile. How far a process may run ahead of its device is bounded (`Meeting.pace`), so that it
notices in time when a peer has died.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import torch

from instep.plan.region import view
from instep.plan.shards import Piece
from instep.protocol import ITEM_BYTES, TensorMeta
from instep.ranks.channel import Channel
from instep.ranks.run import Memory, Run
from instep.transport.group import Group
from instep.transport.store import find

MOMENT = 5.0
"""Seconds to wait for the end of a process whose connection broke: the kernel closes connections
first, long before on a busy host."""

AHEAD, BESIDE = 256, 8
"""How much work a device's queue may hold: copies, and beside each slice of them what sends and
waits. The queue is bounded: when it is full a launch blocks, without a deadline."""


class Join(msgspec.Struct, frozen=True):
    key: str
    backend: str


class ByteRange(msgspec.Struct, frozen=True):
    """Bytes `low` to `high` of one of the runs of a trainer: of its checkpoint tensors, or of the
    live tensors that some are made of.

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
        self.marks: deque[tuple[Callable[[], bool], int]] = deque()
        """Points in the device's queue that it may not have reached, and how much is queued after
        each."""

    def ask_all(self, device: torch.device) -> None:
        """Makes the group of all ranks if there is none. Called in rank 0."""
        if self.group is None or self.group.broken:
            join = Join(uuid.uuid4().hex, "nccl" if device.type == "cuda" else "gloo")
            self.channel.tell("join", join)
            self.enter(join, device)
            self.channel.collect()

    def enter(self, join: Join, device: torch.device) -> None:
        self.close()
        channel = self.channel
        store = find(*channel.address, channel.timeout)
        place = device if join.backend == "nccl" else torch.device("cpu")
        why = partial(channel.miss, range(channel.size), MOMENT)
        self.group = Group(join.backend, store, join.key, channel.rank, channel.size, place, channel.timeout, why)

    def buffer(self, size: int) -> torch.Tensor:
        assert self.group is not None
        if len(self.room) < size or self.room.device != self.group.device:
            self.room = torch.empty(0, dtype=torch.uint8)  # frees the old buffer first
            self.room = torch.empty(size, dtype=torch.uint8, device=self.group.device)
        return self.room[:size]

    @contextmanager
    def engaged(self) -> Iterator[None]:
        """Context manager for the work on a list of stretches. If this rank leaves early, the waits
        of all ranks end. Its queued work is aborted, because it would keep a GPU waiting."""
        try:
            yield
        except BaseException as error:
            self.end(f"trainer rank {self.channel.rank}: {error.args[0] if error.args else 'it was stopped'}")
            self.close()
            raise

    def pace(self, copies: int) -> None:
        """Waits before `copies` are queued on the device, until few enough are ahead of them; until
        none is where `copies` is large. Each wait has the whole time of an answer, because the one
        before it has shown progress. On a CPU copies are done when they return."""
        assert self.group is not None
        self.marks.append((self.group.mark(), copies + BESIDE))
        while len(self.marks) > 1 and sum(number for _, number in self.marks) > AHEAD:
            self.marks.popleft()
            self._reach(self.marks[0][0])
        if copies > AHEAD:
            self._reach(self.marks[0][0])

    def finish(self) -> None:
        """Waits for all queued work."""
        self.pace(0)
        while self.marks:
            self._reach(self.marks.popleft()[0])

    def _reach(self, mark: Callable[[], bool]) -> None:
        assert self.group is not None

        def reached() -> bool:
            self.channel.miss(range(self.channel.size))
            return mark()

        self.group.begin(self.channel.timeout)
        self.group.settle(reached)

    def end(self, reason: str) -> None:
        """Ends the waits of every rank in the group. May be called from another thread."""
        if (group := self.group) is not None:
            group.give_up(reason)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group, self.room = None, torch.empty(0, dtype=torch.uint8)
        self.marks.clear()


def lists(stretches: Sequence[ByteRange], stop: Callable[[ByteRange], bool]) -> Iterator[list[ByteRange]]:
    """Splits stretches into lists, in order. A list ends with each stretch for which `stop`
    holds."""
    together: list[ByteRange] = []
    for stretch in stretches:
        together.append(stretch)
        if stop(stretch) or stretch is stretches[-1]:
            yield together
            together = []


def give(meeting: Meeting, run: Run, memory: Memory, stretch: ByteRange) -> None:
    """Sends what this rank gives of a stretch. Called in ranks other than 0."""
    group, rank = meeting.group, meeting.channel.rank
    assert group is not None
    for low, high in run.slices(rank, stretch.low, stretch.high, stretch.step):
        parts = list(run.packed(rank, low, high))
        meeting.pace(len(parts))
        room = meeting.buffer(stretch.step)[: run.nbytes(rank, low, high)]
        for meta, part, at in parts:
            _in(room, meta, part, at).copy_(view(memory(part.live), part.rows.read))
        group.begin(meeting.channel.timeout)
        group.wait(group.send(room, 0))


def take_all(
    meeting: Meeting, run: Run, memory: Memory, device: torch.device, stretches: Sequence[ByteRange], rooms: Iterator[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Asks for stretches of `run`, one at least. Called in rank 0. Yields each one in the next of
    `rooms`, which are on `device`, filled but for what no rank gives. When it yields the last one
    all ranks are done with the list, so something else can be asked for."""
    meeting.ask_all(device)
    meeting.channel.tell("give", stretches)
    with meeting.engaged():
        for stretch in stretches:
            room = next(rooms)
            take(meeting, run, memory, room, stretch)
            if stretch is not stretches[-1]:
                yield room
        meeting.finish()
        meeting.channel.collect()
    yield room


def take(meeting: Meeting, run: Run, memory: Memory, room: torch.Tensor, stretch: ByteRange) -> None:
    """Fills `room` with a stretch. On a GPU the bytes are there for work that the current stream
    gets next."""
    group = meeting.group
    assert group is not None
    meeting.pace(sum(1 for _ in run.parts(0, stretch.low, stretch.high)))
    run.put(0, memory, room, stretch.low, stretch.high)
    for rank in range(1, group.size):
        for low, high in run.slices(rank, stretch.low, stretch.high, stretch.step):
            parts = list(run.packed(rank, low, high))
            arrived = meeting.buffer(stretch.step)[: run.nbytes(rank, low, high)]
            group.begin(meeting.channel.timeout)
            group.wait(group.recv(arrived, rank))
            meeting.pace(len(parts))
            for meta, part, at in parts:
                run.spot(room, stretch.low, meta, part).copy_(_in(arrived, meta, part, at))


def _in(room: torch.Tensor, meta: TensorMeta, part: Piece, at: int) -> torch.Tensor:
    """Returns the view of a part in a buffer of parts that are sent together."""
    rows = part.rows
    return room[at : at + rows.numel * ITEM_BYTES[meta.dtype]].view(getattr(torch, meta.dtype)).view(rows.count, rows.length)
