"""Direct copies on a GPU: one kernel launch moves every region of every promoted layer and takes the digests on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from instep.digest_cuda import Run, Table
from instep.plan.overlap import Rows, common
from instep.plan.region import rows_of
from instep.plan.routes import apart, reads
from instep.protocol import ITEM_BYTES, Route, TensorMeta
from instep.receiver.copies import Copies
from instep.receiver.regions import copy_regions
from instep.transport.exposed import run_of
from instep.transport.ipc_reader import IpcReader


@dataclass(slots=True)
class Moves:
    """Which copies the kernel makes, in words of 8 bytes, and which it cannot make."""

    runs: list[Run] = field(default_factory=list)
    slots: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """Tensors of which the kernel sums up all that this worker reads, with the slot of the sum."""
    odd: dict[str, list[Route]] = field(default_factory=lambda: defaultdict(list))
    """Routes of tensors that are pulled whole and cut up here: their sum is that of the whole tensor."""

    def slot(self) -> int:
        self.slots += 1
        return self.slots - 1


def moves(copies: Copies, metas: Mapping[str, TensorMeta], places: Callable[[TensorMeta], list[Rows]]) -> Moves:
    """places: of a tensor, all of it, in words. A tensor is odd if any of its routes is no whole number of words, or if routes overlap."""
    made = Moves()
    of_tensor: dict[str, list[Route]] = defaultdict(list)
    for route in copies.routes:
        assert route.tensor is not None
        of_tensor[metas[route.tensor].alias_of or route.tensor].append(route)
    regions = reads(copies.routes, metas)
    others = {metas[name].alias_of or name for name in copies.others}
    for name, routes in of_tensor.items():
        meta, slot = metas[name], made.slot()
        rows = [rows_to(route, meta, copies.live[route.param]) for route in routes]
        whole_words = [some for some in rows if some is not None]
        if len(whole_words) < len(rows) or not apart(regions[name], meta.shape):
            made.odd[name] = routes
            continue
        parts, once = places(meta), set()
        for route, into in zip(routes, whole_words, strict=True):
            # The same bytes a second time (a tied pair kept apart) are moved, and not counted twice.
            counted = slot if route.source not in once else made.slot()
            once.add(route.source)
            made.runs += [run_of(theirs, meta, counted, into=mine) for part in parts for mine, theirs in common(into, part)]
        if name not in others:  # what other layers read of it is not summed up here
            made.parts[name] = slot
    return made


class Puller:
    """The copies of one plan between fixed addresses."""

    def __init__(self, copies: Copies, metas: Mapping[str, TensorMeta], reader: IpcReader) -> None:
        self.copies = copies
        self.moves = moves(copies, metas, reader.places)
        self.table = Table(self.moves.runs, self.moves.slots, reader.device, copy=True)

    def launch(self, metas: Mapping[str, TensorMeta], reader: IpcReader) -> None:
        """The copies are on their way."""
        self.table.launch()
        for name, routes in self.moves.odd.items():
            source = reader.tensor(metas[name])
            copy_regions(routes, self.copies.live, {route.tensor: source for route in routes if route.tensor is not None})

    def sums(self) -> dict[str, int]:
        """Waits. The sum of what this worker holds of each tensor that it pulled in parts: see `digest.py`."""
        sums, _ = self.table.result()
        return {name: sums[slot] for name, slot in self.moves.parts.items()}


def rows_to(route: Route, meta: TensorMeta, live: torch.Tensor) -> Rows | None:
    """What a route writes, in words. None where it cuts one. live: the parameter."""
    assert route.source is not None
    found = rows_of(route.source, route.target)
    if found is None:
        return None
    count, row, source_stride, target_stride = found
    return Rows(count, row, route.source.offset, source_stride, route.target.offset, target_stride).in_words(
        ITEM_BYTES[meta.dtype], live.data_ptr()
    )
