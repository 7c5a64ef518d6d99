"""The trainer's side of shared memory: copies each tensor once into a segment.

When every engine has left a version its segment is used again for the next one: its pages are in
place already, and at most one copy of the model is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

import torch

from instep.digest import cores
from instep.errors import TransportError
from instep.forked import Own
from instep.plan.packed import packed
from instep.protocol import Identity, Location, TensorMeta
from instep.transport import Placed, Published, Pull, elsewhere
from instep.transport.bucket_digests import Result
from instep.transport.copying import Copier
from instep.transport.shm.segment import Segment, sweep


class ShmTransport(Pull):
    """The trainer's side. It has one segment per version; `release_all_but` hands segments over to
    the next version."""

    kind = "shm"
    packed = True
    """Whether small tensors lie side by side."""

    def __init__(self) -> None:
        sweep()
        self.own = Own()
        self.segments: dict[str, Segment] = {}
        self.free: list[Segment] = []
        self.pool = ThreadPoolExecutor(max_workers=cores())
        self.copier = Copier(self.pool)
        self._at_exit = weakref.finalize(self, _close, self.segments, self.free, self.own)

    def why_not(self, _: torch.device, workers: Sequence[Identity]) -> str | None:
        return elsewhere(workers)

    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        if not self._at_exit.alive:
            raise TransportError("the WeightSync was closed", next_step="make a new one")
        size = packed(tensors, small=self.packed).size
        segment = self._segment(size)
        try:
            found = self._brought(segment, tensors, values)
        except BaseException:
            self._take_back(segment)
            raise
        self.segments[segment.name] = segment
        return Published(Location(self.kind, segment.name, size, self.packed), *found)

    def _brought(self, segment: Segment, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Result:
        """Copies a version into a segment. Returns digests, and names of tensors that are not
        finite, of the copies: what a trainer does to its tensors afterwards cannot change what is
        sent."""
        return self.copier.copied(segment.view, tensors, Placed.of(values))

    def _take_back(self, segment: Segment) -> None:
        """Keeps a segment for the next version after filling it failed."""
        self.free.append(segment)

    def _segment(self, size: int) -> Segment:
        for segment in self.free:
            if segment.size >= size:
                self.free.remove(segment)
                return segment
        while self.free:
            self.free.pop().close()
        return self.new_segment(size)

    def new_segment(self, size: int) -> Segment:
        return Segment(size)

    def finish(self, published: Published) -> Published:
        return published

    def release_all_but(self, held: Set[str]) -> None:
        for address in self.segments.keys() - held:
            self.free.append(self.segments.pop(address).renamed())

    def close(self) -> None:
        self._at_exit()
        self.pool.shutdown(wait=False)


def _close(segments: dict[str, Segment], free: list[Segment], own: Own) -> None:
    """Closes all segments. Runs once: when the transport is closed or collected, or when the
    trainer ends without either. A forked child owns nothing."""
    if own.here():
        for segment in (*segments.values(), *free):
            segment.close()
        segments.clear()
        free.clear()
