"""Whether live storage holds what routes bring, on a GPU: by sums, one launch for all that was brought and one for all that is held.

The digest is keyed by position (see `digest.py`), so the same elements of a tensor have the same sum wherever they lie. Where a
route cuts a word of eight bytes, a hash is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

from instep.digest import as_bytes
from instep.digest_cuda import Run, Table
from instep.plan.overlap import Rows, common
from instep.protocol import TensorMeta
from instep.receiver.copies import Copies
from instep.receiver.pull import rows_to
from instep.receiver.regions import Tensors, fits, view
from instep.transport.exposed import run_of

Summary = int | bool
"""Of what one route brings, or of what is held where it leads: equal for equal bytes."""
UNLIKE = False
"""Of storage that is laid out in another way."""


def held(watched: Copies, metas: Mapping[str, TensorMeta], device: torch.device) -> list[Summary]:
    """Of each route, where it leads."""
    found: list[Summary] = [UNLIKE] * len(watched.routes)
    runs = []
    for slot, route in enumerate(watched.routes):
        assert route.tensor is not None
        live, meta = watched.live[route.param], _original(metas, route.tensor)
        if route.param in watched.elsewhere or not fits(live, route, meta.dtype):
            continue
        if (rows := rows_to(route, meta, live)) is not None:
            runs.append(run_of(rows, meta, slot))
        else:
            found[slot] = _hash(view(live, route.target))
    sums = summed(runs, len(found), device)
    for run in runs:
        found[run.slot] = sums[run.slot]
    return found


def brought(watched: Copies, metas: Mapping[str, TensorMeta], places: Callable[[TensorMeta], Sequence[Rows]]) -> list[list[Run]]:
    """What is to be read of the tensors to sum up what each route brings: nothing where it cuts words. places: see `pull.moves`. Slots are
    numbers of routes."""
    runs: list[list[Run]] = []
    for slot, route in enumerate(watched.routes):
        assert route.tensor is not None
        meta = _original(metas, route.tensor)
        rows = rows_to(route, meta, watched.live[route.param])
        runs.append([] if rows is None else [run_of(theirs, meta, slot) for part in places(meta) for _, theirs in common(rows, part)])
    return runs


def summaries(watched: Copies, runs: Sequence[Sequence[Run]], sums: Sequence[int], tensors: Tensors) -> list[Summary]:
    """Of what each route brings. tensors: as they came, for routes that cut words."""
    found: list[Summary] = list(sums)
    for slot, route in enumerate(watched.routes):
        if not runs[slot]:
            assert route.tensor is not None
            assert route.source is not None
            found[slot] = _hash(view(tensors[route.tensor], route.source))
    return found


def summed(runs: Sequence[Run], slots: int, device: torch.device) -> list[int]:
    """Waits."""
    table = Table(runs, slots, device, copy=False)
    table.launch()
    return table.result()[0]


def _hash(part: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(as_bytes(part).data)


def _original(metas: Mapping[str, TensorMeta], name: str) -> TensorMeta:
    return metas[metas[name].alias_of or name]
