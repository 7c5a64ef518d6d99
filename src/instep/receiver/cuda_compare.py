"""Compares live storage with what routes bring, on a GPU: by sums, one launch for all that was
brought and one for all that is held.

The digest is keyed by position (see `digest.py`), so the same elements of a tensor have the same
sum wherever they lie. Regions that cut a word of eight bytes are summed up in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from instep.digest import BLOCK_BYTES, as_bytes, partial, seed_of
from instep.digest_cuda import Run, Table, run_of
from instep.plan.region import extent, simplify, view, whole
from instep.plan.routes import reads
from instep.plan.rows import common, rows_of
from instep.protocol import ITEM_BYTES, Region, Route, TensorMeta
from instep.receiver.copies import Copies
from instep.receiver.pull import Parts, Places, rows_to
from instep.receiver.regions import Tensors, fits, narrowed

Summary = int | None
"""The sum of what one route brings, or of what its target holds. None for another layout."""


class Reads:
    """The regions that some routes read, each once. A slot is an index into `regions`.

    every: the routes of all layers. runs: what the kernel reads to sum up each region. It is empty
    for a region that is all of a tensor, which is summed up when it is pulled, and for one that
    cuts words.
    """

    def __init__(self, asked: Sequence[Route], every: Sequence[Route], metas: Mapping[str, TensorMeta], places: Places) -> None:
        self.metas = metas
        numbers = {name: {region: at for at, region in enumerate(some)} for name, some in reads(every, metas).items()}
        self.of_route = [_key(route, metas) for route in asked]
        self.regions = list(dict.fromkeys(self.of_route))
        self.numbers = [numbers[name][region] for name, region in self.regions]
        self.runs = [
            [] if _is_all(metas[name], region) else list(_runs(metas[name], region, slot, places))
            for slot, (name, region) in enumerate(self.regions)
        ]

    def cut(self) -> set[str]:
        """Returns the tensors of which a region cuts a word."""
        unread = (key for key, runs in zip(self.regions, self.runs, strict=True) if not runs)
        return {name for name, region in unread if not _is_all(self.metas[name], region)}

    def sums(self, summed: Sequence[int], wholes: Mapping[str, int], tensors: Tensors) -> list[int]:
        """Returns the sum of each region. summed: sums of the runs. wholes: sums of whole tensors.
        tensors: values, for regions that are in neither."""
        found = list(summed)
        for slot, (name, region) in enumerate(self.regions):
            if _is_all(self.metas[name], region) and name in wholes:
                found[slot] = wholes[name]
            elif not self.runs[slot]:
                found[slot] = masked(self.metas[name], region, view(tensors[name], region))
        return found

    def brought(self, sums: Sequence[int]) -> list[Summary]:
        """Returns the sum of what each route brings."""
        slots = {key: slot for slot, key in enumerate(self.regions)}
        return [sums[slots[key]] for key in self.of_route]

    def parts(self, sums: Sequence[int], in_one: Collection[str]) -> Parts:
        """Returns sums by tensor and number of the region. in_one: tensors that are reported as a
        whole, left out here."""
        found: Parts = {}
        for (name, _), number, total in zip(self.regions, self.numbers, sums, strict=True):
            if name not in in_one:
                found.setdefault(name, {})[number] = total
        return found


def held(watched: Copies, metas: Mapping[str, TensorMeta], device: torch.device) -> list[Summary]:
    """Returns, for each route of the compared layers, the sum of what its target holds."""
    found: list[Summary] = [None] * len(watched.routes)
    runs = []
    for slot, (route, asked) in enumerate(zip(watched.routes, watched.asked, strict=True)):
        assert asked.source is not None
        live, meta = watched.live[route.param], metas[_key(asked, metas)[0]]
        if route.param in watched.elsewhere or not watched.compares(route) or not fits(live, route, meta.dtype):
            continue
        if (rows := rows_to(route, meta, live)) is not None:
            runs.append(run_of(rows, meta, slot))
        else:
            assert route.source is not None
            part = narrowed(view(live, route.target), getattr(torch, meta.dtype))
            found[slot] = None if part is None else masked(meta, route.source, part)
    sums = summed(runs, len(found), device)
    for run in runs:
        found[run.slot] = sums[run.slot]
    return found


def summed(runs: Sequence[Run], slots: int, device: torch.device) -> list[int]:
    """Sums up runs and waits for the result, if there are any."""
    if not runs:
        return [0] * slots
    table = Table(runs, slots, device, copy=False)
    table.launch()
    return table.result()[0]


def masked(meta: TensorMeta, region: Region, part: torch.Tensor) -> int:
    """Returns the sum of a tensor that has `part` in a region and zeros elsewhere."""
    size, (first, last) = ITEM_BYTES[meta.dtype], extent(region)
    block = first * size // BLOCK_BYTES
    start = block * BLOCK_BYTES // size
    around = torch.zeros(last - start, dtype=part.dtype)
    view(around, Region(region.offset - start, region.shape, region.stride)).copy_(part)
    return partial(as_bytes(around), seed_of(meta), block)


def _key(route: Route, metas: Mapping[str, TensorMeta]) -> tuple[str, Region]:
    assert route.tensor is not None
    assert route.source is not None
    return metas[route.tensor].alias_of or route.tensor, simplify(route.source)


def _is_all(meta: TensorMeta, region: Region) -> bool:
    return region == simplify(whole(meta.shape))


def _runs(meta: TensorMeta, region: Region, slot: int, places: Places) -> Iterator[Run]:
    found = rows_of(region, region)
    if found and (wanted := found.in_words(ITEM_BYTES[meta.dtype], 0)):
        yield from (run_of(rows, meta, slot) for part in places(meta) for rows in common(part, wanted))
