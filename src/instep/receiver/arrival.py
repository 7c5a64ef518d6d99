"""The bytes of a version during one commit: how direct layers get them, and how it is proved that they have.

Where the published bytes can be seen from here, they are copied region by region and compared with live storage. Where they lie in another
process's GPU memory, one kernel pulls them and takes their digests on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from instep.errors import DigestMismatch
from instep.protocol import Manifest, Route, TensorMeta
from instep.receiver.apply import Applier, Tensors, holds, live_tensors, view
from instep.transport import Reader


@dataclass(frozen=True, slots=True)
class Proof:
    """tensors: how many were proved. wholes, parts: see `protocol.WorkerReceipt`."""

    tensors: int
    wholes: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)


class Lazy(Mapping[str, torch.Tensor]):
    """Tensors that are made when they are asked for, and not kept."""

    def __init__(self, metas: Mapping[str, TensorMeta], make: Callable[[TensorMeta], torch.Tensor]) -> None:
        self.metas, self.make = metas, make

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.make(self.metas[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.metas)

    def __len__(self) -> int:
        return len(self.metas)


class Seen:
    """Bytes that can be seen from here."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def move(self, routes: Sequence[Route], live: Tensors) -> None:
        for route in routes:
            if route.tensor is not None and route.source is not None:
                view(live[route.param], route.target).copy_(view(self.tensors[route.tensor], route.source))

    def prove(self, applier: Applier) -> Proof:
        """How many tensors the direct layers hold, bit for bit. Raises `DigestMismatch` naming the first that differs."""
        live = dict(live_tensors(applier.host.model))
        routes = applier.direct_routes()
        for route in routes:
            if not holds(live[route.param], route, self.tensors):
                raise DigestMismatch(f"{route.param} does not hold the bytes of {route.tensor} after the copy", tensor=route.tensor)
        return Proof(len({route.tensor for route in routes}))

    def forget(self) -> None:
        self.tensors = {}


class Pulled:
    """Bytes in the memory of a GPU that another process owns."""

    pullers: dict[Any, Any] = {}  # noqa: RUF012
    """The copies of this process's worker for the addresses and layers that it had last: they stay as long as both do."""

    def __init__(self, manifest: Manifest, reader: Any) -> None:
        self.manifest, self.reader = manifest, reader
        self.metas = {meta.name: meta for meta in manifest.tensors}
        self.tensors: Tensors = Lazy(self.metas, reader.tensor)
        self.parts: dict[str, int] = {}

    def move(self, routes: Sequence[Route], live: Tensors) -> None:
        from instep.receiver.pull import Puller

        key = (self.manifest.location.address, tuple(routes), tuple(live[route.param].data_ptr() for route in routes))
        if key not in self.pullers:
            self.pullers.clear()
            self.pullers[key] = Puller(routes, live, self.metas, self.reader)
        self.parts = self.pullers[key].pull(live, self.reader)

    def prove(self, _: Applier) -> Proof:
        """How many tensors were summed up while they were pulled, and the sums: the trainer compares them with its own."""
        torch.cuda.synchronize(self.reader.device)
        return Proof(len(self.parts.keys() | self.reader.sums.keys()), self.reader.sums, self.parts)

    def forget(self) -> None:
        self.tensors = {}


def arrive(manifest: Manifest, reader: Reader) -> Seen | Pulled:
    if reader.arrived:
        return Seen({meta.name: reader.tensor(meta) for meta in manifest.tensors})
    return Pulled(manifest, reader)
