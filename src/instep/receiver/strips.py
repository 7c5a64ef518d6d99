"""Small regions in host memory, copied and compared without a tensor for each of them.

A call of PyTorch takes a microsecond or more, and gives up the interpreter's lock, for which the
workers of other engines in the process wait. For a few KiB that takes longer than the bytes do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from instep.plan.region import simplify
from instep.protocol import ITEM_BYTES, Route, TensorMeta, dtype_name
from instep.receiver.copies import Copies
from instep.receiver.regions import extends_to, fits

SMALL = 64 << 10
"""Bytes up to which a strip is copied with the interpreter's lock held: a few microseconds."""

_libc = ctypes.PyDLL(None)  # does not give up the interpreter's lock
_memmove, _memcmp = _libc.memmove, _libc.memcmp
for _function in (_memmove, _memcmp):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


class Strips:
    """The routes of some copies that are one run of bytes in the version and in the parameter.

    strips: (offset in the version, address in this process, bytes) of each run. Runs that go on where
    another ends are one. others: the routes that are no such run, or a large one.
    """

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
        self.strips = _merged(sorted(found))

    def holds_for(self, copies: Copies, tensors: Sequence[TensorMeta], offsets: Mapping[str, int]) -> bool:
        """Whether nothing has moved: the tensors in the version, and the parameters' memory."""
        same = tensors is self.tensors or tensors == self.tensors
        return same and offsets == self.offsets and self.at == addresses(copies)

    def copy(self, version: int) -> None:
        """Copies all strips. version: the address of the version in this process."""
        for offset, address, size in self.strips:
            _memmove(address, version + offset, size)

    def equal(self, version: int) -> bool:
        """Whether the parameters hold the version's bytes, in all strips."""
        return not any(_memcmp(address, version + offset, size) for offset, address, size in self.strips)


def addresses(copies: Copies) -> list[int]:
    """Returns the addresses of the parameters' memory: 0 for memory that was given up."""
    return [tensor.data_ptr() for tensor in copies.live.values()]


def _strip(copies: Copies, route: Route, metas: Mapping[str, TensorMeta], offsets: Mapping[str, int]) -> tuple[int, int, int] | None:
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


def _merged(strips: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Joins strips that lie side by side at both ends, up to SMALL bytes."""
    found: list[tuple[int, int, int]] = []
    for offset, address, size in strips:
        if found:
            first, start, length = found[-1]
            if first + length == offset and start + length == address and length + size <= SMALL:
                found[-1] = (first, start, length + size)
                continue
        found.append((offset, address, size))
    return found
