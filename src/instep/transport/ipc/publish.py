"""CUDA IPC: the trainer publishes handles of its live parameters, workers pull from them straight
into their own.

Nothing is copied on the trainer's side, so the trainer must not step before every worker has
pulled: `push` returns after that. Handles are made once for each allocation of the trainer and
opened once by each worker; they are made anew when the trainer's storage has moved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import eq
from typing import TypeVar

import torch

from instep.digest import MASK, seed_of
from instep.errors import SourceError, TransportError
from instep.protocol import Identity, Location, TensorMeta
from instep.transport import Placed, Published, Pull, Sending, elsewhere
from instep.transport.again import second
from instep.transport.ipc.export import Exposed, located
from instep.transport.parts import place_of, whole

T = TypeVar("T")
AHEAD = 0.001
"""Seconds that a request needs to be sent: the threads that send it need the GIL."""
PATIENCE = 1.0
"""Seconds to wait for the trainer's own sums before engines are asked to commit. 61 GB take 0.016
on an H200."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What was published of a source. It stays valid until one of the source's tensors moves.

    place: of all its tensors, where it is known. places: of each, by name. staged: those of which
    workers read copies. exposed: what they read; some of it may have been made for this
    publication, and is kept until the next one.
    """

    tensors: list[TensorMeta]
    place: Hashable
    places: dict[str, Hashable]
    staged: dict[str, torch.Tensor]
    exposed: Exposed
    location: Location

    def holds(self, tensors: list[TensorMeta], place: Hashable) -> bool:
        """Tells whether nothing has moved and no tensor needs a copy."""
        return place is not None and place == self.place and not self.staged and self.tensors == tensors

    def fits(self, tensors: list[TensorMeta], given: dict[str, torch.Tensor]) -> bool:
        same = self.tensors == tensors and list(self.places) == list(given)
        return same and all(map(eq, map(place_of, given.values()), self.places.values()))

    def check(self, tensors: list[TensorMeta], values: Placed) -> None:
        """Reads those values again of which workers see a copy. Raises `SourceError` where one has
        changed."""
        shared, different = dict(zip(self.places, self.exposed.memories, strict=True)), dict[str, torch.Tensor]()
        for meta, value in second(tensors, values):
            if meta.name in self.staged or place_of(value) != self.places[meta.name]:
                own = value.to(shared[meta.name].dtype).reshape(-1).view(torch.uint8)
                different[meta.name] = (own != shared[meta.name].view(torch.uint8)).any()
        changed = torch.stack(list(different.values())).tolist() if different else []
        if any(changed):
            raise SourceError.changed(list(different)[changed.index(True)])


class IpcTransport(Pull):
    """The trainer's side. A tensor is staged in a buffer on the trainer's GPU if it is not
    contiguous, not of the dtype to send, or no whole number of 8-byte words. The buffers are kept.
    """

    digests_apart = True

    def __init__(self) -> None:
        self.handles: dict[int, bytes] = {}
        self.buffers: dict[TensorMeta, torch.Tensor] = {}
        self.layout: _Layout | None = None
        self.summed: Published | None = None
        self.prefetched = False

    def why_not(self, device: torch.device, workers: Sequence[Identity]) -> str | None:
        if device.type != "cuda":
            return f"the trainer's tensors are on {device.type}"
        other = next((worker.device for worker in workers if not worker.device.startswith("cuda")), None)
        return f"an engine's worker is on {other}" if other else elsewhere(workers)

    def prefetch(self) -> None:
        """Starts new sums of what was shared last. `publish` uses them if the source is still the
        same."""
        layout = self.layout
        self.prefetched = layout is not None and layout.place is not None and not layout.staged and layout.exposed.stay()
        if layout is not None and self.prefetched:
            layout.exposed.launch()

    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """Publishes the version. If no tensor has moved since the last time, only the digests are
        taken anew.

        Those sums are the first read, and workers that pull make the second one. Of what is copied
        or made here workers see the copy: so it is read again here."""
        read = Placed.of(values)
        layout, prefetched, self.prefetched = self.layout, self.prefetched, False
        if layout is None or not layout.holds(tensors, read.place):
            layout, prefetched = self._laid_out(tensors, _by_name(read), read.place), False
        if not prefetched:
            layout.exposed.launch()
        if read.place is None or layout.staged:
            layout.check(tensors, read)
        self.layout, self.summed = layout, None
        return Published(layout.location, {}, launch=layout.exposed.launches)

    def _laid_out(self, tensors: list[TensorMeta], given: dict[str, torch.Tensor], place: Hashable) -> _Layout:
        """Returns the last layout if nothing has moved, else a new one. Copies the values that are
        staged."""
        layout = self.layout
        if layout is None or not layout.fits(tensors, given):
            layout = self._lay_out(tensors, given)
        for name, room in layout.staged.items():
            room.copy_(given[name].detach())
        return replace(layout, place=place)

    @asynccontextmanager
    async def serving(self, step: str) -> AsyncIterator[Sending]:
        if step != "commit":
            yield self
            return
        await self._wait_for_sums()
        yield Beside(self._look_at_sums)

    async def _wait_for_sums(self) -> None:
        """Waits for the sums of what was published. Workers pull nothing before, so an engine that
        is paused earlier would stand still for as long. Workers wait with a deadline, so this wait
        may end without the sums."""
        assert self.layout is not None
        summed, started = self.layout.exposed.summed, time.monotonic()
        while not summed() and time.monotonic() - started < PATIENCE:  # noqa: ASYNC110 - a GPU sets no event of asyncio
            await asyncio.sleep(0)

    def _look_at_sums(self) -> Published:
        if self.summed is None:
            self.summed = self._summed()
        return self.summed

    def finish(self, _: Published) -> Published:
        return self._look_at_sums()

    def _summed(self) -> Published:
        """Waits for the sums of what was published and returns them as digests."""
        assert self.layout is not None
        return with_digests(self.layout.location, self.layout.tensors, self.layout.exposed.result())

    def _lay_out(self, tensors: list[TensorMeta], given: dict[str, torch.Tensor]) -> _Layout:
        metas = {meta.name: meta for meta in tensors if not meta.alias_of}
        device = next(iter(given.values())).device
        for name, value in given.items():
            _check(name, value, metas.get(name), device)
        if missing := metas.keys() - given.keys():
            raise SourceError(f"the source did not give {min(missing)}, which its metadata names", tensor=min(missing))
        own = {name: whole(metas[name], value.detach().reshape(-1)) for name, value in given.items() if value.is_contiguous()}
        readable = {name for name, part in own.items() if part.readable(device)}
        staged = {name: self._room(metas[name], device) for name in given if name not in readable}
        parts = [whole(metas[name], staged[name].reshape(-1)) if name in staged else own[name] for name in given]
        exposed = Exposed(parts, device, self.handles)
        self.handles = exposed.handles
        places = {name: place_of(value) for name, value in given.items()}
        return _Layout(list(tensors), None, places, staged, exposed, located(tensors, [exposed.offer], exposed.board_at))

    def _room(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        """Returns the buffer for a tensor's copy. Zeros follow up to the next whole word."""
        if meta not in self.buffers:
            self.buffers[meta] = torch.zeros(-(-meta.nbytes // 8), dtype=torch.int64, device=device)
        return self.buffers[meta].view(torch.uint8)[: meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)

    def release_all_but(self, held: Set[str]) -> None:
        """Does nothing: the memory is the trainer's own."""

    def close(self) -> None:
        self.buffers.clear()
        self.handles = {}
        self.layout = self.summed = None


class Beside:
    """Runs the trainer's own work while workers take a step, so that the push need not wait for it
    afterwards."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    async def abort_on_failure(self, step: Awaitable[T]) -> T:
        under_way = asyncio.ensure_future(step)
        try:
            await asyncio.wait([under_way], timeout=AHEAD)
            self.work()
            return await under_way
        finally:
            under_way.cancel()
            await asyncio.wait([under_way])  # cleaning up must not run beside it


def _by_name(values: Placed) -> dict[str, torch.Tensor]:
    """Returns the values of a source by name. Raises `TransportError` where a source fills the same
    memory with one value after the other: workers would all see the last one."""
    given: dict[str, torch.Tensor] = {}
    for name, value in values.read():
        if given.setdefault(name, value) is not value:
            raise SourceError(f"the source gave {name} twice", tensor=name)
    ends: list[tuple[int, int, str]] = sorted((value.data_ptr(), value.data_ptr() + value.nbytes, name) for name, value in given.items())
    for (_, end, one), (start, _, other) in pairwise(ends):
        if start < end and not values.stays:
            raise TransportError(f"{one} and {other} were given in the same memory, one after the other: it can only be copied")
    return given


def _check(name: str, value: torch.Tensor, meta: TensorMeta | None, device: torch.device) -> None:
    if meta is None or tuple(value.shape) != meta.shape:
        raise SourceError(f"the source gave {name} {list(value.shape)}, which is not what its metadata says", tensor=name)
    if value.device != device:
        raise TransportError(f"{name} is on {value.device}, other weights on {device}: CUDA IPC shares memory of one GPU")


def with_digests(location: Location, tensors: Sequence[TensorMeta], sums: Mapping[str, tuple[int, bool]]) -> Published:
    """Makes a publication with digests. sums: of each tensor, as `Exposed.result` returns them."""
    own = [(meta.name, seed_of(meta), *sums[meta.name]) for meta in tensors if not meta.alias_of]
    return Published(location, {name: (seed + part) & MASK for name, seed, part, _ in own}, tuple(name for name, _, _, flag in own if flag))
