"""A version that passes by in buckets during a commit: what direct layers take of each goes
straight into live storage, and is summed up on the way, before the next but one takes its place.
What other layers need is put aside (see `streamed.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain

import torch

from instep.digest_cuda import Run, Table, results, run_of
from instep.plan.buckets import pieces
from instep.plan.packed import packed
from instep.plan.rows import Rows, contiguous
from instep.protocol import Manifest, TensorMeta
from instep.receiver import cuda_compare
from instep.receiver.apply import Applier
from instep.receiver.copies import Copies
from instep.receiver.proof import Proof, check_places
from instep.receiver.pull import Parts, moves
from instep.receiver.regions import copy_regions
from instep.receiver.streamed import Passed, StreamedStateDict
from instep.transport.reader import Passing


def cut_run(run: Run, low: int, high: int, base: int) -> Iterator[Run]:
    """Yields the parts of a run that lie in bytes `low` to `high` of the version, which are at
    address `base`. Places of the run are counted from the version's first word."""
    return (run._replace(rows=rows.moved((base - low) // 8)) for rows in run.rows.stored(low // 8, high // 8))


def by_bucket(runs: Iterable[Run], size: int) -> Mapping[int, list[Run]]:
    """Returns, for each bucket of `size` bytes, the runs that may reach into it, in order. So a run
    is cut for few buckets."""
    found: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        for index in range(8 * run.rows.place // size, -(-8 * run.rows.end // size)):
            found[index].append(run)
    return found


class Scatter:
    """Copies out of buckets that stay at their addresses, for one plan.

    watched: copies that are not made; what they bring is summed up, region by region. buckets: the
    memory of each bucket, in order. wholes: see `protocol.PrepareRequest`. All tables are copied to
    the GPU here: later that would wait for the current stream, which may wait for a peer that died.
    """

    def __init__(
        self,
        copies: Copies,
        watched: Copies | None,
        manifest: Manifest,
        buckets: Sequence[torch.Tensor],
        wholes: Collection[str] = (),
    ) -> None:
        self.bucket = manifest.location.bucket
        self.metas = {meta.name: meta for meta in manifest.tensors}

        offsets = packed(manifest.tensors, small=False).offsets

        def places(meta: TensorMeta) -> list[Rows]:
            return [contiguous(-(-meta.nbytes // 8), offsets[meta.name] // 8)]

        self.moves = moves(copies, self.metas, places, wholes)
        self.aside = {self.metas[name].alias_of or name for name in copies.others} | self.moves.odd.keys()
        self.pieces = [[(meta, rows) for meta, rows in here if meta.name in self.aside] for here in pieces(manifest.tensors, self.bucket)]
        self.slots = {name: slot for slot, name in enumerate(sorted(self.aside), self.moves.slots)}
        asked = [*(watched.asked if watched else ()), *self.moves.asked]
        self.reads = cuda_compare.Reads(asked, copies.every, self.metas, places)
        moved, read = by_bucket(self.moves.runs, self.bucket), by_bucket(chain.from_iterable(self.reads.runs), self.bucket)
        slots, device = self.moves.slots + len(self.slots) + len(self.reads.regions), buckets[0].device if buckets else None
        self.board = torch.zeros(2 * slots, dtype=torch.int64, device=device)  # of all buckets
        self.tables = [self._tables(index, bucket, moved[index], read[index]) for index, bucket in enumerate(buckets)]

    def _tables(self, index: int, bucket: torch.Tensor, moves: Sequence[Run], reads: Sequence[Run]) -> list[Table]:
        low, base, first = index * self.bucket, bucket.data_ptr(), self.moves.slots + len(self.slots)
        moved = [part for run in moves for part in cut_run(run, low, low + len(bucket), base)]
        read = [run_of(rows.moved(base).in_padded_words(), meta, self.slots[meta.name]) for meta, rows in self.pieces[index]]
        for run in reads:
            read += [part._replace(slot=first + run.slot) for part in cut_run(run, low, low + len(bucket), base)]
        slots, device = len(self.board) // 2, self.board.device
        return [Table(some, slots, device, copy=copy, sums=self.board) for some, copy in ((moved, True), (read, False)) if some]

    def begin(self) -> None:
        """Begins another version."""
        self.board.zero_()

    def launch(self, index: int) -> None:
        """Moves a bucket's bytes of direct layers, and adds them to the sums, with the bytes of
        tensors that are put aside."""
        for table in self.tables[index]:
            table.launch(clear=False)

    def sums(self) -> tuple[dict[str, int], Parts, list[int]]:
        """Waits for the GPU. Returns sums of tensors that were put aside, of regions that were
        moved, and of regions that are only read."""
        total = results(self.board)[0]
        wholes = {name: total[slot] for name, slot in self.slots.items()}
        parts = {name: {number: total[slot] for number, slot in slots.items()} for name, slots in self.moves.parts.items()}
        return wholes, parts, total[len(total) - len(self.reads.regions) :]


class Streamed:
    """The bytes of a version that the trainer sends during the commit."""

    once = True

    def __init__(self, manifest: Manifest, reader: Passing, wholes: Collection[str] = ()) -> None:
        self.manifest, self.reader, self.in_one = manifest, reader, wholes
        self.listed: Sequence[TensorMeta] = manifest.tensors
        self.wholes: dict[str, int] = {}
        self.direct: Parts = {}
        self.theirs: dict[str, int] = {}
        self.read: list[int] = []
        self.aside: StreamedStateDict | None = None
        reader.begin()  # nothing is written before all ranks take part

    def move(self, copies: Copies, watched: Copies | None, *, in_turn: bool) -> Mapping[str, torch.Tensor]:
        """Starts the copies. With `in_turn` a bucket is received when the loader asks for something
        in it; otherwise all are received now."""
        at = self.manifest.location.address, watched, *self.in_one
        if copies.worked_out is None or copies.worked_out[0] != at:
            copies.worked_out = (at, Scatter(copies, watched, self.manifest, self.reader.parts, self.in_one))
        self.copies, self.scatter = copies, copies.worked_out[1]
        self.scatter.begin()
        kept = self._twice() if in_turn else self.scatter.aside
        self.aside = StreamedStateDict(self.scatter.metas, self.scatter.aside, kept, self._passing(ahead=not in_turn), self.reader.device)
        if in_turn:
            self.aside.take()  # later buckets are received when the loader asks
        else:
            self._take_all()
        return self.aside

    def _passing(self, *, ahead: bool) -> Iterator[Passed]:
        """Yields what each bucket has of tensors that are put aside. Nothing else may be under way
        while a loader looks at it: copying or freeing memory would wait for ever for a peer that
        died."""
        for index, bucket in self.reader.each(ahead=ahead):
            self.scatter.launch(index)
            found = [(meta, rows, bucket[rows.place : rows.end]) for meta, rows in self.scatter.pieces[index]]
            if found or not ahead:
                self.reader.settle()
            yield found

    def _twice(self) -> set[str]:
        """Returns tensors that may be asked for more than once: those that have aliases, and those
        in which a route cuts a word."""
        metas = self.scatter.metas
        return {meta.alias_of for meta in metas.values() if meta.alias_of} | self.scatter.reads.cut()

    def _take_all(self) -> None:
        """Receives the remaining buckets, if there are any."""
        aside = self.aside
        if aside is None or aside.ended:
            return
        aside.take_all()
        self.theirs = self.reader.told()
        for routes in self.scatter.moves.odd.values():
            copy_regions(routes, self.copies.live, aside)
        self.wholes, self.direct, read = self.scatter.sums()
        self.read = self.scatter.reads.sums(read, self.wholes, aside)

    def held(self, watched: Copies) -> Sequence[object]:
        return cuda_compare.held(watched, self.scatter.metas, self.reader.device)

    def brought(self, watched: Copies) -> Sequence[object]:
        self._take_all()
        return self.scatter.reads.brought(self.read)[: len(watched.asked)]

    def settle(self) -> None:
        self._take_all()
        self.reader.settle()

    def prove(self, applier: Applier) -> Proof:
        """Returns this worker's sums with those that the trainer has sent.

        Raises `ApplyError` where the reload session has moved a layer that had been written
        directly.
        """
        check_places(self.copies, applier)
        some = [self.direct, self.scatter.reads.parts(self.read, self.in_one)]
        return Proof.of(self.wholes, some, self.theirs, applier.wanted(self.scatter.metas))

    def forget(self) -> None:
        """Receives the remaining buckets even after a loader failed: other engines wait for the
        same ones."""
        with suppress(Exception):  # the loader's error was reported already
            self._take_all()
        self.aside = None
