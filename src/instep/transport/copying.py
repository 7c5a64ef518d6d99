"""A source copied into one run of bytes, and read again to prove that the copy is of one moment (see `again.py`)."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, wait

import numpy as np
import torch

from instep.digest import BLOCK_BYTES, CHUNK, MASK, Bytes, all_flags, block_sums, from_flags, from_sums, seed_of
from instep.digest_cuda import Table, in_one
from instep.errors import SourceError
from instep.plan.buckets import layout, padded
from instep.protocol import TensorMeta
from instep.transport import Placed
from instep.transport.again import described_as, second
from instep.transport.bucket_digests import Result
from instep.transport.parts import whole

BACKLOG = 64  # chunks waiting to be copied: a source that makes its tensors on the way must not run far ahead

_memcmp = ctypes.CDLL(None).memcmp  # lets other threads run, and makes no array of answers
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def copied(view: Bytes, tensors: Sequence[TensorMeta], values: Placed, pool: Executor) -> Result:
    """Copies every value to its place in `view` (`plan.buckets.layout`), cast to the dtype of its description, zeros up to the next.

    Returns digests, and names of tensors that are not finite, of the copies. Raises `SourceError` where a value is not the one that is
    described, and where the second read finds other bytes. No thread of `pool` writes to `view` any more afterwards.
    """
    copy = _Copy(view, tensors, pool)
    copy.fill(values)
    copy.compare(values)
    return copy.result()


class _Copy:
    def __init__(self, view: Bytes, tensors: Sequence[TensorMeta], pool: Executor) -> None:
        self.view, self.tensors, self.pool = view, tensors, pool
        self.own = [meta for meta in tensors if not meta.alias_of]
        self.offsets, size = layout(tensors)
        self.sums = np.zeros(size // BLOCK_BYTES, np.uint64)
        self.flags = np.zeros(size // BLOCK_BYTES, np.bool_)

    def fill(self, values: Placed) -> None:
        metas = {meta.name: meta for meta in self.tensors}
        given: set[str] = set()
        backlog: deque[Future[None]] = deque()
        try:
            for name, value in values.read():
                meta = described_as(metas, name, value)
                if name in given or meta.alias_of:
                    raise SourceError(f"the source gave {name} twice", tensor=name)
                given.add(name)
                started = self._start(meta, value.detach())
                backlog.extend(started)
                while len(backlog) > BACKLOG:
                    backlog.popleft().result()
                if not values.stays:
                    wait(started)
            for future in backlog:
                future.result()
        finally:
            wait(backlog)  # also after an error: the next version may get the same memory
        if missing := {meta.name for meta in self.own} - given:
            raise SourceError(f"the source did not give {min(missing)}, which its metadata names", tensor=min(missing))

    def compare(self, values: Placed) -> None:
        on_gpus: dict[torch.device, list[tuple[TensorMeta, torch.Tensor]]] = defaultdict(list)
        backlog: deque[Future[str | None]] = deque()
        try:
            for meta, value in second(self.tensors, values):
                if value.is_cuda and values.stays and value.is_contiguous() and whole(meta, value.view(-1)).readable(value.device):
                    on_gpus[value.device].append((meta, value))
                    continue
                jobs = [self.pool.submit(self._differs, meta, at, data) for at, data in _pieces(meta, value)]
                backlog.extend(jobs)
                while len(backlog) > BACKLOG:
                    _raise_changed(backlog.popleft())
                if not values.stays:
                    wait(jobs)
            for future in backlog:
                _raise_changed(future)
        finally:
            wait(backlog)
        for device, found in on_gpus.items():
            self._compare_on(device, found)

    def _compare_on(self, device: torch.device, found: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:
        """By sums that a GPU takes: to bring the bytes here once more takes many times as long."""
        runs = [in_one(value.data_ptr(), meta, slot) for slot, (meta, value) in enumerate(found)]
        table = Table(runs, len(runs), device, copy=False)
        table.launch()
        copies = from_sums(self.sums, [meta for meta, _ in found], self.offsets)
        for (meta, _), total in zip(found, table.result()[0], strict=True):
            if (seed_of(meta) + total) & MASK != copies[meta.name]:
                raise SourceError.changed(meta.name)

    def result(self) -> Result:
        flagged = from_flags({meta.dtype: self.flags for meta in self.own}, self.own, self.offsets)
        return from_sums(self.sums, self.own, self.offsets), tuple(flagged)

    def _room(self, meta: TensorMeta) -> Bytes:
        at = self.offsets[meta.name]
        return self.view[at : at + padded(meta.nbytes)]

    def _start(self, meta: TensorMeta, value: torch.Tensor) -> list[Future[None]]:
        """What cannot be copied as it is, is cast, gathered from strides or fetched from a device here, in one pass."""
        data, room = _in_place(meta, value), self._room(meta)
        if data is None:
            torch.from_numpy(room[: meta.nbytes]).view(getattr(torch, meta.dtype)).view(meta.shape).copy_(value)
            room[meta.nbytes :] = 0
        return [
            self.pool.submit(self._take, meta, at, None if data is None else data[at : at + CHUNK]) for at in range(0, len(room), CHUNK)
        ]

    def _take(self, meta: TensorMeta, start: int, data: Bytes | None) -> None:
        """Bytes from `start` on, CHUNK at most: copies them where they are given, and sums them up."""
        room = self._room(meta)[start : start + CHUNK]
        if data is not None:
            np.copyto(room[: data.size], data)
            room[data.size :] = 0
        first = (self.offsets[meta.name] + start) // BLOCK_BYTES
        here = slice(first, first + room.size // BLOCK_BYTES)
        self.sums[here], self.flags[here] = block_sums(room), all_flags(room, meta.dtype)

    def _differs(self, meta: TensorMeta, at: int, data: Bytes) -> str | None:
        """The name of a tensor whose bytes from `at` on are not those that were copied."""
        room = self._room(meta)[at : at + data.size]
        return meta.name if _memcmp(room.ctypes.data, data.ctypes.data, data.size) else None


def _in_place(meta: TensorMeta, value: torch.Tensor) -> Bytes | None:
    """The value's own bytes where they can be copied as they are."""
    if value.dtype == getattr(torch, meta.dtype) and value.is_contiguous() and value.device.type == "cpu":
        return value.reshape(-1).view(torch.uint8).numpy()
    return None


def _pieces(meta: TensorMeta, value: torch.Tensor) -> Iterator[tuple[int, Bytes]]:
    """A value's bytes as they are sent, with where they begin. What has to be made for that is made in pieces."""
    data = _in_place(meta, value)
    if data is not None:
        yield from ((at, data[at : at + CHUNK]) for at in range(0, data.size, CHUNK))
        return
    rows, at = value.reshape(1) if not value.ndim else value, 0
    for some in torch.split(rows, max(1, CHUNK * len(rows) // max(1, meta.nbytes))):
        made = some.to("cpu", getattr(torch, meta.dtype)).contiguous().reshape(-1).view(torch.uint8).numpy()
        yield at, made
        at += made.size


def _raise_changed(future: Future[str | None]) -> None:
    if (name := future.result()) is not None:
        raise SourceError.changed(name)
