"""The workers' side of a broadcast: versions that are staged in host memory, and versions that pass by on a GPU."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from instep.digest import MASK
from instep.digest_cuda import warm_up
from instep.errors import TransportError
from instep.plan.buckets import buckets
from instep.protocol import Location, Manifest, TensorMeta
from instep.transport import Me
from instep.transport.group import Group, find
from instep.transport.mapped import Mapped
from instep.transport.tally import HostTally


def receive(group: Group, count: int, room: Callable[[int], torch.Tensor]) -> Iterator[int]:
    """The index of each bucket when it is there; the next one is under way by then. room: as in `pack`."""
    under_way: deque[Any] = deque()
    for index in range(count):
        under_way.append(group.broadcast(room(index)))
        if len(under_way) == 2:
            group.wait(under_way.popleft())
            yield index - 1
    for left in range(len(under_way), 0, -1):
        group.wait(under_way.popleft())
        yield count - left


JOINED: dict[str, tuple[str, Group]] = {}
"""The group of each worker of this process, by its incarnation, with the address it was found at."""


def join(location: Location, me: Me, device: torch.device) -> Group:
    """The group that a version is sent to; joined anew when the trainer has made another."""
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


class StagedReader(Mapped):
    """A worker's side where versions are staged in memory of its own."""

    def __init__(self, manifest: Manifest, me: Me) -> None:
        self.location, self.me, self.tensors = manifest.location, me, manifest.tensors
        file = _anonymous_file(self.location.nbytes)
        try:
            super().__init__(manifest, file)
            self.room = torch.from_numpy(np.frombuffer(mmap.mmap(file, max(self.size, 1)), np.uint8))
        finally:
            os.close(file)

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        group = join(self.location, self.me, torch.device("cpu"))
        group.begin(self.me.timeout)
        group.meet(self.location.sending)
        parts = [self.room[low:high] for low, high in buckets(self.size, self.location.bucket)]
        tally = HostTally(self.tensors, self.location.bucket, flags=False)
        for index in receive(group, len(parts), parts.__getitem__):
            tally.add(index, parts[index])
        del self.room
        return tally.result()[0]


class StreamReader:
    """A worker's side where versions pass by in the commit, in two buckets on its GPU that stay with the group."""

    arrived = split = False
    fetches = streams = True

    def __init__(self, manifest: Manifest, me: Me) -> None:
        self.location, self.me, self.device = manifest.location, me, torch.device(me.device)
        self.group: Group | None = None
        self.parts: list[torch.Tensor] = []  # the room of each bucket
        self.names: list[str] = []

    def arrive(self, tensors: list[TensorMeta]) -> dict[str, int]:
        """Joins. Nothing arrives before the commit."""
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
        self.under_way = receive(self.group, len(self.parts), self.parts.__getitem__)
        self.first = next(self.under_way, None)
        self.group.settle()

    def receive(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each bucket with its index, good until the next but one."""
        if self.first is not None:
            for index in chain([self.first], self.under_way):
                yield index, self.parts[index]

    def told(self) -> dict[str, int]:
        """After the last bucket: the trainer's own sums, by tensor."""
        assert self.group is not None
        self.group.wait(self.group.broadcast(self.board))
        self.group.settle()
        return {name: value & MASK for name, value in zip(self.names, self.board.tolist(), strict=True)}

    def settle(self) -> None:
        assert self.group is not None
        self.group.settle()

    def stop(self) -> None: ...

    def close(self) -> bool:
        return True


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("instep")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, max(size, 1))
    return file
