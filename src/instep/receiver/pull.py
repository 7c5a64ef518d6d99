"""Direct copies on a GPU: one kernel launch moves every region of every promoted layer and takes the digests on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from instep.digest import seed_of
from instep.digest_cuda import Run, Table
from instep.plan.region import rows_of
from instep.protocol import ITEM_BYTES, Region, Route, TensorMeta
from instep.receiver.apply import view
from instep.transport.ipc import IpcReader


class Puller:
    """The copies of one plan between fixed addresses. `odd` routes do not consist of whole words and take the slow way."""

    def __init__(
        self, routes: Sequence[Route], live: Mapping[str, torch.Tensor], metas: Mapping[str, TensorMeta], reader: IpcReader
    ) -> None:
        self.odd: list[Route] = []
        regions: dict[str, list[Region]] = defaultdict(list)
        runs = []
        self.slots: dict[str, int] = {}
        for route in routes:
            if route.tensor is None or route.source is None:
                continue
            meta = metas[route.tensor]
            name = meta.alias_of or meta.name
            run = _run(route, live[route.param], metas[name], reader.address(meta), self.slots.setdefault(name, len(self.slots)))
            if run is None:
                self.odd.append(route)
            elif route.source not in regions[name]:
                regions[name].append(route.source)
                runs.append(run)
            else:  # the same bytes a second time (a tied pair kept apart): moved, and not counted twice
                runs.append(replace(run, slot=self.slots.setdefault(f"again {name}", len(self.slots))))
        self.table = Table(runs, len(self.slots), reader.device, copy=True)
        self.names = list(regions)
        self.metas = metas

    def pull(self, live: Mapping[str, torch.Tensor], reader: IpcReader) -> dict[str, int]:
        """The sum of what this worker holds of each tensor: see `digest.py`."""
        self.table.launch()
        for route in self.odd:
            assert route.tensor is not None
            assert route.source is not None
            target, source = live[route.param], reader.tensor(self.metas[route.tensor])
            view(target, route.target).copy_(view(source, route.source))
        sums, _ = self.table.result()
        return {name: sums[self.slots[name]] for name in self.names}


def _run(route: Route, target: torch.Tensor, meta: TensorMeta, address: int, slot: int) -> Run | None:
    assert route.source is not None
    size = ITEM_BYTES[meta.dtype]
    rows = rows_of(route.source, route.target)
    at, to = address + size * route.source.offset, target.data_ptr() + size * route.target.offset
    if rows is None or any(value % 8 for value in (at, to, *(size * value for value in (route.source.offset, *rows[1:])))):
        return None
    count, row, source_stride, target_stride = rows
    words = [size * value // 8 for value in (row, source_stride, target_stride, route.source.offset)]
    return Run(at, to, count, words[0], words[1], words[2], words[3], seed_of(meta), slot, meta.dtype)
