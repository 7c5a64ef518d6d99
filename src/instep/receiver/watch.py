"""Whether live storage holds what routes bring, on a GPU: by sums, one launch for all that was brought and one for all that is held.

The digest is keyed by position (see `digest.py`), so the same elements of a tensor have the same sum wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from instep.digest_cuda import Run, Table
from instep.plan.overlap import Rows, common
from instep.protocol import TensorMeta
from instep.receiver.apply import Tensors, fits, holds
from instep.receiver.copies import Copies
from instep.receiver.pull import rows_to
from instep.transport.exposed import run_of

Summary = int | bool
"""Of what one route brings, or of what is held where it leads: equal for equal bytes."""
UNLIKE = False
"""Of storage that is laid out in another way."""


def held(watched: Copies, metas: Mapping[str, TensorMeta], device: torch.device, tensors: Tensors) -> list[Summary]:
    """Of each route, where it leads. tensors: as they were brought, for routes that cut words."""
    found: list[Summary] = []
    runs = []
    for slot, route in enumerate(watched.routes):
        assert route.tensor is not None
        live, meta = watched.live[route.param], _original(metas, route.tensor)
        rows = rows_to(route, meta, live)
        if rows is not None and fits(live, route, meta.dtype):
            runs.append(run_of(rows, meta, slot))
        found.append(UNLIKE if rows is not None else holds(live, route, tensors))
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


def summaries(runs: Sequence[Sequence[Run]], sums: Sequence[int]) -> list[Summary]:
    """Of what was brought. Where words are cut, what is held is compared with it."""
    return [total if some else True for some, total in zip(runs, sums, strict=True)]


def summed(runs: Sequence[Run], slots: int, device: torch.device) -> list[int]:
    """Waits."""
    table = Table(runs, slots, device, copy=False)
    table.launch()
    return table.result()[0]


def _original(metas: Mapping[str, TensorMeta], name: str) -> TensorMeta:
    return metas[metas[name].alias_of or name]
