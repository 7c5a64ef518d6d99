"""Small regions in host memory, copied and compared without a tensor for each of them.

PyTorch gives up the interpreter's lock in each call, for which the workers of other engines in the
process wait (see `transport.addresses`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from instep.plan.region import simplify
from instep.protocol import ITEM_BYTES, Route, TensorMeta, dtype_name
from instep.receiver.copies import Copies
from instep.receiver.regions import extends_to, fits
from instep.transport.addresses import SMALL, Strip, Strips


class RouteStrips(Strips):
    """The routes of some copies that are one run of bytes in the version and in the parameter.
    others: the routes that are no such run, or a large one."""

    def __init__(self, copies: Copies, tensors: Sequence[TensorMeta], offsets: Mapping[str, int]) -> None:
        self.tensors, self.offsets, self.at = tensors, offsets, addresses(copies)
        self.others: list[Route] = []
        metas = {meta.name: meta for meta in tensors}
        found = []
        for route in copies.routes:
            strip = _strip(copies, route, metas, offsets)
            if strip is None:
                self.others.append(route)
            else:
                found.append(strip)
        super().__init__(found)

    def holds_for(self, copies: Copies, tensors: Sequence[TensorMeta], offsets: Mapping[str, int]) -> bool:
        """Whether nothing has moved: the tensors in the version, and the parameters' memory."""
        same = tensors is self.tensors or tensors == self.tensors
        return same and offsets == self.offsets and self.at == addresses(copies)


def addresses(copies: Copies) -> list[int]:
    """Returns the addresses of the parameters' memory: 0 for memory that was given up."""
    return [tensor.data_ptr() for tensor in copies.live.values()]


def _strip(copies: Copies, route: Route, metas: Mapping[str, TensorMeta], offsets: Mapping[str, int]) -> Strip | None:
    assert route.tensor is not None
    assert route.source is not None
    meta, live = metas[route.tensor], copies.live[route.param]
    one_run = all(simplify(region).stride in ((), (1,)) for region in (route.source, route.target))
    in_host = live.device.type == "cpu" and live.data_ptr() and dtype_name(live.dtype) == meta.dtype
    if not (one_run and in_host and fits(live, route, meta.dtype) and extends_to(route.source) <= meta.numel):
        return None
    size = ITEM_BYTES[meta.dtype]
    if size * route.source.numel > SMALL:
        return None
    offset = offsets[meta.alias_of or meta.name] + size * route.source.offset
    return offset, live.data_ptr() + size * route.target.offset, size * route.source.numel
