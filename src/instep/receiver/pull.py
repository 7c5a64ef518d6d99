"""Direct copies on a GPU: one kernel launch moves every region of every promoted layer and takes
the digests on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from instep.digest import Words
from instep.digest_cuda import Run, Table, run_of, totals
from instep.plan.region import simplify
from instep.plan.routes import apart, reads
from instep.plan.rows import Rows, common, rows_of
from instep.protocol import ITEM_BYTES, Region, Route, TensorMeta, dtype_name
from instep.receiver.copies import Copies
from instep.receiver.regions import copy_regions
from instep.transport.reader import Remote

Parts = dict[str, dict[int, int]]
"""Sums of regions of tensors, by name and number."""
Places = Callable[[TensorMeta], Sequence[Rows]]
"""Returns where the parts of a tensor are mapped, in words of 8 bytes."""


@dataclass(slots=True)
class Moves:
    """Which copies the kernel makes, in words of 8 bytes, and which it cannot make."""

    runs: list[Run] = field(default_factory=list)
    slots: int = 0
    parts: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Regions that the kernel sums up, by tensor and number (`plan.routes.reads`), with the slots
    of their sums."""
    odd: dict[str, list[Route]] = field(default_factory=lambda: defaultdict(list))
    """Routes of tensors that are pulled whole and cut up here: their sum is that of the whole
    tensor."""
    asked: list[Route] = field(default_factory=list)
    """The same routes, with regions of the checkpoint tensor (`Copies.asked`)."""

    def slot(self) -> int:
        self.slots += 1
        return self.slots - 1


def moves(copies: Copies, metas: Mapping[str, TensorMeta], places: Places, wholes: Collection[str] = ()) -> Moves:
    """Works out the kernel's copies. A tensor is odd if one of its routes is no whole number of
    words, or if routes overlap.

    wholes: tensors that are odd because the regions that all workers read overlap or leave gaps.
    """
    made = Moves()
    of_tensor: dict[str, list[tuple[Route, Route, Region]]] = defaultdict(list)
    for route, asked in zip(copies.routes, copies.asked, strict=True):
        assert route.tensor is not None
        assert asked.source is not None
        of_tensor[metas[route.tensor].alias_of or route.tensor].append((route, asked, simplify(asked.source)))
    regions = reads(copies.every, metas)
    for name, routes in of_tensor.items():
        meta = metas[name]
        found = [rows_to(route, meta, copies.live[route.param]) for route, _, _ in routes]
        whole_words = [some for some in found if some is not None]
        if name in wholes or len(whole_words) < len(found) or not apart({region for _, _, region in routes}, meta.shape):
            made.odd[name] = [route for route, _, _ in routes]
            made.asked += [asked for _, asked, _ in routes]
            continue
        parts, slots = places(meta), made.parts[name]
        for (_, _, region), into in zip(routes, whole_words, strict=True):
            # Bytes that two routes read (tied parameters in two copies) move twice and count once.
            number = regions[name].index(region)
            counted = made.slot()
            slots.setdefault(number, counted)
            made.runs += [run_of(rows, meta, counted) for part in parts for rows in common(part, into)]
    return made


class Puller:
    """Runs the copies of one plan between fixed addresses."""

    def __init__(self, copies: Copies, metas: Mapping[str, TensorMeta], reader: Remote, wholes: Collection[str]) -> None:
        self.copies, self.metas = copies, metas
        self.moves = moves(copies, metas, reader.places, wholes)
        self.table = Table(self.moves.runs, self.moves.slots, reader.device, copy=True)
        self.reads: tuple[Copies | None, Any] | None = None
        """What else is summed up (`cuda_compare.Reads`), and for which copies of other layers."""
        self.totals: Words = np.empty(0, np.uint64)
        self._alone: tuple[Sequence[str], Any] | None = None

    def launch(self, reader: Remote) -> None:
        """Starts the copies."""
        self.table.launch()
        for name, routes in self.moves.odd.items():
            source = reader.tensor(self.metas[name])
            copy_regions(routes, self.copies.live, {route.tensor: source for route in routes if route.tensor is not None})

    def wait(self) -> None:
        """Waits for the copies."""
        self.totals = totals(self.table.sums)

    def proves(self, names: Sequence[str], theirs: Words) -> bool:
        """Whether each of these tensors was pulled in one region, no other one was, and their sums
        are the trainer's: one comparison of all, because an engine is paused meanwhile."""
        if self._alone is None or self._alone[0] != names:
            self._alone = names, self._slots(names)
        slots = self._alone[1]
        return slots is not None and np.array_equal(self.totals[slots], theirs)

    def _slots(self, names: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        parts = self.moves.parts
        if not names or self.moves.odd or parts.keys() != set(names) or any(slots.keys() != {0} for slots in parts.values()):
            return None
        return np.array([parts[name][0] for name in names], np.int64)

    def sums(self) -> Parts:
        """Returns the sums of the regions that this worker pulled, by tensor and number: see
        `digest.py`."""
        sums = self.totals.tolist()
        return {name: {number: sums[slot] for number, slot in slots.items()} for name, slots in self.moves.parts.items()}


def rows_to(route: Route, meta: TensorMeta, live: torch.Tensor) -> Rows | None:
    """Returns what a route writes, in words. None where the route cuts a word or widens the dtype.
    live: the parameter."""
    assert route.source is not None
    rows = rows_of(route.source, route.target) if dtype_name(live.dtype) == meta.dtype else None
    return rows.in_words(ITEM_BYTES[meta.dtype], live.data_ptr()) if rows else None
