"""Digests of a version that passes by in buckets, and which of its tensors hold a number that is
not finite."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from instep.digest import BLOCK_BYTES, MASK, all_flags, all_sums, from_flags, from_sums, seed_of
from instep.digest_cuda import Table, as_words, in_one, run_of
from instep.errors import SourceError
from instep.plan.buckets import buckets, layout, padded, pieces
from instep.plan.rows import Rows, contiguous
from instep.protocol import TensorMeta
from instep.transport import Placed
from instep.transport.parts import whole

Values = Iterable[tuple[str, torch.Tensor]]
Contents = tuple[TensorMeta, Rows]
"""Bytes of a tensor, and where in a bucket they lie (`plan.buckets.pieces`)."""
Result = tuple[dict[str, int], tuple[str, ...]]
HELD = 512 << 20  # bytes of values that may have been made, kept until they have been summed up


class Tally(Protocol):
    def add(self, index: int, bucket: torch.Tensor) -> None:
        """Sums up bucket `index`, which is complete: a flat tensor of bytes, laid out as
        `plan.buckets.pieces` says, with zeros between tensors."""

    def told(self) -> torch.Tensor | None:
        """Returns the sums without seeds, for the workers, after every bucket was added. None where
        workers get them in another way."""

    def result(self) -> Result:
        """Returns the digest of each tensor by name, and the names of tensors that are not finite,
        after every bucket was added."""


class HostTally:
    """Computes digests of buckets in host memory. flags: whether to look for numbers that are not
    finite."""

    def __init__(self, tensors: Sequence[TensorMeta], limit: int, *, flags: bool) -> None:
        self.own = [meta for meta in tensors if not meta.alias_of]
        self.offsets, size = layout(tensors)
        self.blocks = limit // BLOCK_BYTES
        self.sums = np.zeros(size // BLOCK_BYTES, np.uint64)
        self.flags = {dtype: np.zeros(len(self.sums), np.bool_) for dtype in {meta.dtype for meta in self.own}} if flags else {}

    def add(self, index: int, bucket: torch.Tensor) -> None:
        data = bucket.numpy()
        here = slice(index * self.blocks, index * self.blocks + data.size // BLOCK_BYTES)
        self.sums[here] = all_sums(data)
        for dtype, flags in self.flags.items():
            flags[here] = all_flags(data, dtype)

    def told(self) -> None:
        return None

    def result(self) -> Result:
        flagged = from_flags(self.flags, self.own, self.offsets) if self.flags else []
        return from_sums(self.sums, self.own, self.offsets), tuple(flagged)


class DeviceTally:
    """Computes digests of buckets on a GPU, and fills the buckets too. rooms: where the buckets
    lie, in turn.

    Tables are made before anything is sent or after all of it. Copying one to the GPU waits for the
    current stream, which may wait for a peer that has died. So tensors that have not moved since
    the last version are copied and summed up by one launch per bucket. The others are copied one by
    one, and read again for their sums.
    """

    def __init__(self, tensors: Sequence[TensorMeta], limit: int, rooms: Sequence[torch.Tensor]) -> None:
        self.tensors, self.rooms = tensors, rooms
        self.own = [meta for meta in tensors if not meta.alias_of]
        self.slots = {meta.name: slot for slot, meta in enumerate(self.own)}
        self.sizes = [high - low for low, high in buckets(layout(tensors)[1], limit)]
        self.pieces = list(pieces(tensors, limit))
        self.board = torch.zeros(2 * len(self.own), dtype=torch.int64, device=rooms[0].device)  # sums, then how many flags there are
        self.read = [self._table(index, here, {}) for index, here in enumerate(self.pieces)]
        self.places: dict[str, int] = {}  # addresses of tensors in the version before, of which `moved` is made
        self.moved: list[list[Table]] = [[] for _ in self.pieces]
        self.found: dict[str, int] = {}  # the same in the version that is packed now
        self.used: dict[int, list[Table]] = {}
        self.place: Hashable = None  # `Placed.place` of `places` if complete; `packed`: of `found`
        self.packed: Hashable = None

    def begin(self) -> None:
        """Begins another version."""
        self.found, self.used, self.packed = {}, {}, None
        self.board.zero_()

    def pack(self, values: Placed, room: Callable[[int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Fills buckets as the function `pack` does. A value whose memory the source may reuse is
        copied before the next value is asked for."""
        if values.place is not None and values.place == self.place:
            yield from self._pack_again(room)
            self.packed = values.place
            return
        given, held = described(self.own, values.read()), dict[str, torch.Tensor]()
        for index, here in enumerate(self.pieces):
            bucket = room(index, self.sizes[index])
            lay = self.places if values.stays else {}
            lie = [(meta, rows) for meta, rows in here if meta.name in lay]
            for meta, rows in here:
                if rows.at == 0:
                    held[meta.name] = self._taken(*next(given), stays=values.stays)
                if meta.name not in lay:
                    _put(bucket, (meta, rows), held[meta.name])
            if any(self.found.get(meta.name) != self.places[meta.name] for meta, _ in lie):
                for meta, rows in lie:
                    _put(bucket, (meta, rows), held[meta.name])
            elif lie:
                self.used[index] = self.moved[index]
                for table in self.moved[index]:
                    table.launch(clear=False)
            yield bucket
            held = {meta.name: held[meta.name] for meta, rows in here if rows.at + rows.length < meta.nbytes}
        next(given, None)  # raises if the source gives more than it describes
        self.packed = values.place if len(self.found) == len(self.own) else None

    def _pack_again(self, room: Callable[[int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Fills the buckets without looking at any tensor, because all lie where they lay."""
        self.found, self.used = self.places, dict(enumerate(self.moved))
        for index, tables in enumerate(self.moved):
            bucket = room(index, self.sizes[index])
            for table in tables:
                table.launch(clear=False)
            yield bucket

    def _taken(self, meta: TensorMeta, value: torch.Tensor, *, stays: bool) -> torch.Tensor:
        flat = value.reshape(-1) if value.is_contiguous() and stays else None
        if flat is not None and whole(meta, flat).readable(self.rooms[0].device):
            self.found[meta.name] = value.data_ptr()
            return flat.view(torch.uint8)
        return in_bytes(meta, value)

    def add(self, index: int, _: torch.Tensor) -> None:
        if index not in self.used:
            self.used[index] = [self.read[index]]
            self.read[index].launch(clear=False)

    def told(self) -> torch.Tensor:
        return self.board[: len(self.own)]

    def result(self) -> Result:
        """Returns what `Tally.result` says. Makes new tables for the next version if a tensor has
        moved."""
        found = _result(self.own, self.board)
        if self.found != self.places:
            self.places = self.found
            self.moved = [self._both(index, here) for index, here in enumerate(self.pieces)]
        self.place = self.packed
        return found

    def _both(self, index: int, here: Sequence[Contents]) -> list[Table]:
        lie = [one for one in here if one[0].name in self.places]
        rest = [one for one in here if one[0].name not in self.places]
        return [self._table(index, some, places) for some, places in ((lie, self.places), (rest, {})) if some]

    def _table(self, index: int, here: Sequence[Contents], places: Mapping[str, int]) -> Table:
        """Makes the table that sums up pieces of a bucket. The pieces are read in the bucket or,
        where `places` are given, while they are copied from there."""
        room = self.rooms[index % len(self.rooms)]
        runs = []
        for meta, rows in here:
            there = rows.moved(room.data_ptr())
            if places:
                there = contiguous(rows.length, places[meta.name] + rows.at, rows.at, there.place)
            runs.append(run_of(there.in_padded_words(), meta, self.slots[meta.name]))
        return Table(runs, len(self.slots), room.device, copy=bool(places), sums=self.board)


class First:
    """The first read of a version on a GPU. It sums up a source's tensors where they lie, before
    any of them is sent."""

    def __init__(self, tensors: Sequence[TensorMeta], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self.own = [meta for meta in tensors if not meta.alias_of]
        self.slots = {meta.name: slot for slot, meta in enumerate(self.own)}
        self.place: Hashable = None
        self.tables: list[tuple[list[int], Table]] = []  # each with the addresses that it reads
        self.board = torch.zeros(2 * len(self.own), dtype=torch.int64, device=device)  # of all tables

    def take(self, values: Placed) -> None:
        """Starts the first read. Tensors that lie where they lay are not listed anew."""
        self.board.zero_()
        if values.place is not None and values.place == self.place:
            for _, table in self.tables:
                table.launch(clear=False)
            return
        self.place, last, self.tables = None, self.tables, []
        held: list[tuple[TensorMeta, torch.Tensor]] = []
        in_place, nbytes = True, 0  # a copy would be stale in the next version
        for meta, value in described(self.own, values.read()):
            held.append((meta, as_words(value.to(getattr(torch, meta.dtype)))))
            in_place &= held[-1][1].data_ptr() == value.data_ptr()
            nbytes += held[-1][1].nbytes
            if not values.stays or nbytes > HELD:
                self._launch(held, last)
                held, nbytes = [], 0
        if held:
            self._launch(held, last)
        self.place = values.place if in_place else None

    def told(self) -> torch.Tensor:
        """Returns the sums without seeds. Does not wait for the GPU."""
        return self.board[: len(self.own)]

    def result(self) -> Result:
        """Waits for the GPU and returns what `Tally.result` says."""
        return _result(self.own, self.board)

    def _launch(self, held: Sequence[tuple[TensorMeta, torch.Tensor]], last: Sequence[tuple[list[int], Table]]) -> None:
        at, addresses = len(self.tables), [words.data_ptr() for _, words in held]
        if at < len(last) and last[at][0] == addresses:
            self.tables.append(last[at])
        else:
            runs = [in_one(words.data_ptr(), meta, self.slots[meta.name]) for meta, words in held]
            self.tables.append((addresses, Table(runs, len(self.slots), self.device, copy=False, sums=self.board)))
        self.tables[-1][1].launch(clear=False)


def _result(own: Sequence[TensorMeta], board: torch.Tensor) -> Result:
    """Turns a board of sums into digests and names. board: sums without seeds, then the count of
    flags of each tensor."""
    sums, flags = (part.tolist() for part in board.cpu().chunk(2))
    digests = {meta.name: (seed_of(meta) + total) & MASK for meta, total in zip(own, sums, strict=True)}
    return digests, tuple(meta.name for meta, flag in zip(own, flags, strict=True) if flag)


def sums_of(digests: Mapping[str, int], tensors: Sequence[TensorMeta], device: torch.device) -> torch.Tensor:
    """Returns digests as sums without seeds, as a tally tells them. A tensor without a digest gets
    an arbitrary sum."""
    own = [meta for meta in tensors if not meta.alias_of]
    sums = np.array([(digests.get(meta.name, 0) - seed_of(meta)) & MASK for meta in own], np.uint64)
    return torch.from_numpy(sums.view(np.int64)).to(device)


def pack(tensors: Sequence[TensorMeta], values: Values, limit: int, room: Callable[[int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Fills buckets with the bytes of `values`, which come in the order of `tensors`, each cast to
    the dtype of its description.

    room: gives the memory for bucket `index`, a flat tensor of `size` bytes; it may be given again
    two buckets later. Raises `SourceError` where a value is not the one that is described.
    """
    edges = iter(buckets(layout(tensors)[1], limit))
    index, filled, bucket = -1, 0, torch.empty(0)
    for meta, value in described((meta for meta in tensors if not meta.alias_of), values):
        data = in_bytes(meta, value)
        at, end = 0, padded(meta.nbytes)
        while at < end:
            if filled == len(bucket):
                if index >= 0:
                    yield bucket
                low, high = next(edges)
                index, filled, bucket = index + 1, 0, room(index + 1, high - low)
            step = min(end - at, len(bucket) - filled)
            here = min(step, max(meta.nbytes - at, 0))
            bucket[filled : filled + here].copy_(data[at : at + here])
            bucket[filled + here : filled + step].zero_()
            at, filled = at + step, filled + step
    if index >= 0:
        yield bucket


def described(tensors: Iterable[TensorMeta], values: Values) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Yields the values of a source, each with its description. tensors: those that are no aliases.

    Raises `SourceError` where a value is another than the one that is described, and where there
    are more.
    """
    given = iter(values)
    for meta in tensors:
        name, value = next(given, ("nothing", None))
        if value is None or name != meta.name or tuple(value.shape) != meta.shape:
            raise SourceError(f"the source gave {name} where its metadata has {meta.name} {list(meta.shape)}", tensor=meta.name)
        yield meta, value.detach()
    if (extra := next(given, None)) is not None:
        raise SourceError(f"the source gave {extra[0]}, which its metadata does not have", tensor=extra[0])


def in_bytes(meta: TensorMeta, value: torch.Tensor) -> torch.Tensor:
    """Returns a value cast to the dtype of its description, as a flat tensor of bytes."""
    return value.to(getattr(torch, meta.dtype)).contiguous().reshape(-1).view(torch.uint8)


def _put(bucket: torch.Tensor, contents: Contents, data: torch.Tensor) -> None:
    """Copies bytes of a tensor into a bucket, then zeros up to the next whole word, because the
    digest counts whole words."""
    _, rows = contents
    bucket[rows.place : rows.end].copy_(data[rows.at : rows.at + rows.length])
    bucket[rows.end : rows.end + -rows.end % 8].zero_()
