"""The workers' side of a broadcast: versions that are staged in host memory, and versions that pass
by on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from instep.digest import MASK
from instep.digest_cuda import warm_up
from instep.errors import TransportError
from instep.plan.buckets import buckets
from instep.protocol import Location, Manifest, TensorMeta
from instep.transport.bucket_digests import HostTally
from instep.transport.group import Group
from instep.transport.mapped import Staged
from instep.transport.reader import Passing, WorkerContext
from instep.transport.store import find


class Buckets:
    """Receives the buckets of rank 0 into `parts`, one after the other. Two are under way at a
    time, so a part may share its memory with the last but one."""

    def __init__(self, group: Group, parts: Sequence[torch.Tensor]) -> None:
        self.group, self.parts = group, parts
        self.arrived = 0
        self.under_way: deque[Any] = deque()
        self._ask()
        self._ask()

    def wait(self) -> None:
        """Waits for the next bucket, if one is under way."""
        if self.under_way:
            self.group.wait(self.under_way.popleft())
            self.arrived += 1

    def each(self, *, ahead: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields each bucket with its index. A bucket is valid until the next but one. ahead: other
        buckets may travel meanwhile."""
        for index, part in enumerate(self.parts):
            while self.arrived <= index or (self.under_way and not ahead):
                self.wait()
            yield index, part
            self._ask()

    def _ask(self) -> None:
        asked = self.arrived + len(self.under_way)
        if asked < len(self.parts):
            self.under_way.append(self.group.broadcast(self.parts[asked]))


JOINED: dict[str, tuple[str, Group]] = {}
"""The group of each worker of this process, by its incarnation, with the address it was found
at."""


def join(location: Location, me: WorkerContext, device: torch.device) -> Group:
    """Returns the group that a version is sent to. Joins it anew when the trainer has made
    another."""
    if me.incarnation not in location.ranks:
        raise TransportError("this worker is not in the group that the version is sent to: it was restarted meanwhile. Push again")
    address, group = JOINED.get(me.incarnation, ("", None))
    if group is None or group.broken or address != location.address:
        if group is not None:
            group.close()
        key, host, port = location.address.split("@")
        store = find(host, int(port), me.timeout)
        size = 1 + len(location.ranks)
        group = Group(location.transport, store, key, location.ranks[me.incarnation], size, device, me.timeout)
        JOINED[me.incarnation] = location.address, group
    return group


class StagedReader(Staged):
    """A worker's side of Gloo: versions are staged in host memory."""

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        group = join(self.location, self.me, torch.device("cpu"))
        group.begin(self.me.timeout)
        group.meet(self.location.sending)
        parts = [self.room[low:high] for low, high in buckets(self.size, self.location.bucket)]
        tally = HostTally(self.tensors, self.location.bucket, flags=False)
        for index, part in Buckets(group, parts).each(ahead=True):
            tally.add(index, part)
        del self.room
        return tally.result()[0]


class StreamReader(Passing):
    """A worker's side of NCCL: versions pass by in the commit, in two buckets on its GPU that stay
    with the group."""

    def __init__(self, manifest: Manifest, me: WorkerContext) -> None:
        self.location, self.me, self.device = manifest.location, me, torch.device(me.device)
        self.group: Group | None = None
        self.parts: list[torch.Tensor] = []  # the room of each bucket
        self.names: list[str] = []

    def arrive(self, tensors: list[TensorMeta]) -> dict[str, int]:
        """Joins the group. Nothing arrives before the commit."""
        warm_up(self.device)
        self.group = join(self.location, self.me, self.device)
        if not self.group.rooms:
            self.group.rooms = [torch.empty(self.location.bucket, dtype=torch.uint8, device=self.device) for _ in range(2)]
        edges = enumerate(buckets(self.location.nbytes, self.location.bucket))
        self.parts = [self.group.rooms[index % 2][: high - low] for index, (low, high) in edges]
        self.names = [meta.name for meta in tensors]
        self.board = torch.empty(len(tensors), dtype=torch.int64, device=self.device)
        return {}

    def begin(self) -> None:
        """Returns when every worker and the trainer take part, and the first bucket is there."""
        assert self.group is not None
        self.group.begin(self.me.timeout)
        self.group.meet(self.location.sending)
        self.buckets = Buckets(self.group, self.parts)
        self.buckets.wait()
        self.group.settle()

    def each(self, *, ahead: bool) -> Iterator[tuple[int, torch.Tensor]]:
        return self.buckets.each(ahead=ahead)

    def told(self) -> dict[str, int]:
        """Receives the trainer's own sums, by tensor, after the last bucket."""
        assert self.group is not None
        self.group.wait(self.group.broadcast(self.board))
        self.group.settle()
        return {name: value & MASK for name, value in zip(self.names, self.board.tolist(), strict=True)}

    def settle(self) -> None:
        assert self.group is not None
        self.group.settle()
