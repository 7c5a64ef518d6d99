"""A source copied into one run of bytes, and read again to prove that the copy is of one moment
(see `again.py`)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import NamedTuple

import numpy as np
import torch

from instep.digest import BLOCK_BYTES, CHUNK, MASK, Bytes, all_flags, block_sums, seed_of
from instep.digest_cuda import Table, in_one
from instep.errors import SourceError
from instep.plan.buckets import padded
from instep.plan.packed import ALIGN, packed
from instep.protocol import TensorMeta
from instep.transport import Placed
from instep.transport.addresses import Addresses, bytes_at
from instep.transport.again import described_as, second
from instep.transport.bucket_digests import Result
from instep.transport.cast import Cast, memcmp
from instep.transport.parts import whole

BACKLOG = 64  # chunks waiting to be copied: a source that makes its tensors on the way must not run far ahead


class Copier:
    """Copies one version of a source after the other into runs of bytes. It knows where the last
    one's tensors lay."""

    def __init__(self, pool: Executor) -> None:
        self.pool = pool
        self.known: Addresses | None = None

    def copied(self, view: Bytes, tensors: Sequence[TensorMeta], values: Placed) -> Result:
        """Copies every value to its place in `view` (`plan.packed`; `Location.packed` must be set),
        cast to its description's dtype, zeros up to the next.

        Returns digests, and names of tensors that are not finite, of the copies. Raises
        `SourceError` where a value is not the one that is described, and where the second read
        finds other bytes. No thread of the pool writes to `view` any more afterwards.
        """
        copy, known = _Copy(view, tensors, self.pool), self.known
        self.known = None
        if known is not None and known.hold_for(values.place, tensors) and (held := known.held()) is not None:
            copy.again(known, values.told)
            del held
        else:
            copy.fill(values)
            copy.compare(values)
            known = copy.addresses(values)
        self.known = known
        return copy.result()


class _Copy:
    def __init__(self, view: Bytes, tensors: Sequence[TensorMeta], pool: Executor) -> None:
        self.view, self.tensors, self.pool = view, tensors, pool
        self.own = [meta for meta in tensors if not meta.alias_of]
        self.places = packed(tensors)
        self.offsets, self.edge = self.places.offsets, self.places.edge
        self.sums = np.zeros(self.edge // BLOCK_BYTES, np.uint64)
        self.flags = np.zeros(self.edge // BLOCK_BYTES, np.bool_)
        self.digests: dict[str, int] = {}
        self.given: list[tuple[TensorMeta, torch.Tensor]] = []  # that were copied as they lie

    def fill(self, values: Placed) -> None:
        metas = {meta.name: meta for meta in self.tensors}
        given: set[str] = set()
        jobs = _Jobs(lambda some: self.pool.submit(self._take, some), together=values.stays)
        with jobs:
            for name, value in values.read():
                meta = described_as(metas, name, value)
                if name in given or meta.alias_of:
                    raise SourceError(f"the source gave {name} twice", tensor=name)
                given.add(name)
                if values.place is not None and values.stays and isinstance(_lying(meta, value), np.ndarray):
                    self.given.append((meta, value.detach()))
                if meta.nbytes < BLOCK_BYTES:
                    self._put(meta, value.detach())
                else:
                    jobs.do(self._strips(meta, value.detach()))
        if missing := {meta.name for meta in self.own} - given:
            raise SourceError(f"the source did not give {min(missing)}, which its metadata names", tensor=min(missing))
        self.digests = self.places.with_sums(self.sums, self.view)

    def addresses(self, values: Placed) -> Addresses | None:
        """Returns where the tensors lie, if all were copied as they lie and the source can tell
        whether they do so again."""
        if values.place is None or len(self.given) < len(self.own):
            return None
        return Addresses(values.place, self.tensors, self.offsets, self.given)

    def again(self, known: Addresses, told: Callable[[int], None]) -> None:
        """Copies tensors from where they lie, and compares them. told: see `Placed`."""
        at = self.view.ctypes.data
        large = [(meta, bytes_at(address, size)) for meta, (_, address, size) in known.large]
        with _Jobs(lambda some: self.pool.submit(self._take, some), together=True) as jobs:
            for meta, data in large:
                jobs.do(self._chunks(meta, data))
                told(meta.nbytes)
            self.view[self.edge :] = 0
            known.small.give(at)
            told(known.small.nbytes)
        self.digests = self.places.with_sums(self.sums, self.view)
        with _Jobs(lambda some: self.pool.submit(self._compare, some), together=True) as jobs:
            for meta, data in large:
                jobs.do(self._strip(meta, low, some, some.size) for low, some in _chunked(data))
        if (name := known.different(at)) is not None:
            raise SourceError.changed(name)

    def compare(self, values: Placed) -> None:
        on_gpus: dict[torch.device, list[tuple[TensorMeta, torch.Tensor]]] = defaultdict(list)
        jobs = _Jobs(lambda some: self.pool.submit(self._compare, some), together=values.stays)
        with jobs:
            for meta, value in second(self.tensors, values):
                if value.is_cuda and values.stays and value.is_contiguous() and whole(meta, value.view(-1)).readable(value.device):
                    on_gpus[value.device].append((meta, value))
                elif meta.nbytes < BLOCK_BYTES:
                    self._compare([self._strip(meta, at, data, data.size) for at, data in _pieces(meta, value)])
                else:
                    jobs.do(self._strip(meta, at, data, data.size) for at, data in _pieces(meta, value))
        for device, found in on_gpus.items():
            self._compare_on(device, found)

    def _compare_on(self, device: torch.device, found: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:
        """Compares tensors with their copies by sums that the GPU takes. Copying the bytes to the
        host once more takes many times as long."""
        runs = [in_one(value.data_ptr(), meta, slot) for slot, (meta, value) in enumerate(found)]
        table = Table(runs, len(runs), device, copy=False)
        table.launch()
        for (meta, _), total in zip(found, table.result()[0], strict=True):
            if (seed_of(meta) + total) & MASK != self.digests[meta.name]:
                raise SourceError.changed(meta.name)

    def result(self) -> Result:
        return self.digests, tuple(self.places.non_finite({meta.dtype: self.flags for meta in self.own}, self.view))

    def _room(self, meta: TensorMeta) -> Bytes:
        at = self.offsets[meta.name]
        return self.view[at : at + padded(meta.nbytes)]

    def _strips(self, meta: TensorMeta, value: torch.Tensor) -> Iterator[_Strip]:
        """Returns the strips of a large value. A value that does not lie in host memory in order is
        copied here."""
        data = _lying(meta, value)
        if data is None:
            room = self._room(meta)
            _fill(room[: meta.nbytes], meta, value)
            room[meta.nbytes :] = 0
        return self._chunks(meta, data)

    def _chunks(self, meta: TensorMeta, data: Bytes | Cast | None) -> Iterator[_Strip]:
        size = padded(meta.nbytes)
        for at in range(0, size, CHUNK):
            yield self._strip(meta, at, None if data is None else data[at : at + CHUNK], min(CHUNK, size - at))

    def _put(self, meta: TensorMeta, value: torch.Tensor) -> None:
        """Copies a small value in this thread: another one would have to be told."""
        low = self.offsets[meta.name]
        end, high = low + meta.nbytes, low + -(-meta.nbytes // ALIGN) * ALIGN
        if (data := _lying(meta, value)) is not None:
            _write(self.view[low:end], data)
        elif meta.nbytes:
            _fill(self.view[low:end], meta, value)
        if end < high:
            self.view[end:high] = 0

    def _strip(self, meta: TensorMeta, at: int, data: Bytes | Cast | None, size: int) -> _Strip:
        low = self.offsets[meta.name] + at
        return _Strip(meta, low, low + size, data)

    def _take(self, strips: Sequence[_Strip]) -> None:
        """Copies strips that have data and sums up all of them at once. The strips follow each
        other and have one dtype."""
        for strip in strips:
            if strip.data is not None:
                end = strip.low + strip.data.size
                _write(self.view[strip.low : end], strip.data)
                self.view[end : strip.high] = 0
        low, high = strips[0].low, strips[-1].high
        here, room = slice(low // BLOCK_BYTES, high // BLOCK_BYTES), self.view[low:high]
        self.sums[here], self.flags[here] = block_sums(room), all_flags(room, strips[0].meta.dtype)

    def _compare(self, strips: Sequence[_Strip]) -> None:
        """Raises `SourceError` naming the first tensor whose bytes are not those that were
        copied."""
        at = self.view.ctypes.data
        for strip in strips:
            if strip.data is not None and not _equal(at + strip.low, strip.data):
                raise SourceError.changed(strip.meta.name)


class _Strip(NamedTuple):
    """Bytes `low` to `high` of the run, which belong to one tensor. data: what to copy or cast
    there; None where the bytes are there already."""

    meta: TensorMeta
    low: int
    high: int
    data: Bytes | Cast | None


class _Jobs:
    """Lets other threads process strips. Many small strips that follow each other make one job.

    together: whether a source leaves its values alone while others are asked for. However the block
    ends, no job runs afterwards.
    """

    def __init__(self, start: Callable[[Sequence[_Strip]], Future[None]], *, together: bool) -> None:
        self.start, self.together = start, together
        self.strips: list[_Strip] = []
        self.backlog: deque[Future[None]] = deque()

    def do(self, strips: Iterable[_Strip]) -> None:
        for strip in strips:
            if self.strips and not self._goes_with(strip):
                self._submit()
            self.strips.append(strip)
        if not self.together:
            self._submit()
            wait(self.backlog)

    def _goes_with(self, strip: _Strip) -> bool:
        first, last = self.strips[0], self.strips[-1]
        near = last.high <= strip.low < last.high + BLOCK_BYTES and strip.high - first.low <= CHUNK
        return near and strip.meta.dtype == first.meta.dtype

    def _submit(self) -> None:
        if self.strips:
            self.backlog.append(self.start(self.strips))
            self.strips = []
        while len(self.backlog) > BACKLOG:
            self.backlog.popleft().result()

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._submit()
                for future in self.backlog:
                    future.result()
        finally:
            wait(self.backlog)  # also after an error: the next version may get the same memory


def _lying(meta: TensorMeta, value: torch.Tensor) -> Bytes | Cast | None:
    """Returns a value's elements if they lie in host memory in order, or None."""
    if not value.is_contiguous() or value.device.type != "cpu":
        return None
    flat, wanted = value.reshape(-1), getattr(torch, meta.dtype)
    return flat.view(torch.uint8).numpy() if value.dtype == wanted else Cast(flat, wanted)


def _pieces(meta: TensorMeta, value: torch.Tensor) -> Iterator[tuple[int, Bytes | Cast]]:
    """Yields a value's elements, each piece with its offset in bytes. What does not lie in host
    memory in order is moved there and cast piece by piece."""
    data = _lying(meta, value)
    if data is not None:
        yield from _chunked(data)
        return
    rows, at = value.reshape(1) if not value.ndim else value, 0
    for some in torch.split(rows, max(1, CHUNK * len(rows) // max(1, meta.nbytes))):
        made = some.to("cpu", getattr(torch, meta.dtype)).contiguous().reshape(-1).view(torch.uint8).numpy()
        yield at, made
        at += made.size


def _chunked(data: Bytes | Cast) -> Iterator[tuple[int, Bytes | Cast]]:
    return ((at, data[at : at + CHUNK]) for at in range(0, data.size, CHUNK))


def _fill(room: Bytes, meta: TensorMeta, value: torch.Tensor) -> None:
    """Copies a value that does not lie in host memory in order."""
    if value.device.type == "cpu":  # as the second read does: PyTorch's loops differ in the NaN that a cast gives
        for at, data in _pieces(meta, value):
            _write(room[at : at + data.size], data)
    else:
        torch.from_numpy(room).view(getattr(torch, meta.dtype)).view(meta.shape).copy_(value)


def _write(room: Bytes, data: Bytes | Cast) -> None:
    if isinstance(data, Cast):
        data.write(room)
    else:
        room[:] = data


def _equal(address: int, data: Bytes | Cast) -> bool:
    return data.lies_at(address) if isinstance(data, Cast) else not memcmp(address, data.ctypes.data, data.size)
