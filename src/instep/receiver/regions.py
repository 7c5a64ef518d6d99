"""Regions of tensors: copied, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from instep.plan.dtypes import widens
from instep.plan.region import strided
from instep.protocol import Region, Route, WorkerPlan, dtype_name

Tensors = Mapping[str, torch.Tensor]


def offered(plan: WorkerPlan, names: Collection[str | None], tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Some tensors, in their order, as an initial load gives them to the engine's loader.

    Those that the loader computes with are in host memory: the same arithmetic on a GPU rounds
    otherwise (an exponential differs in the last bit). Those that it writes into are copies.
    """
    for name in tensors:
        if name in names:
            tensor = tensors[name].cpu() if name in plan.computed else tensors[name]
            yield name, tensor.clone() if name in plan.overwritten else tensor


def view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """`region` of a contiguous tensor, or of the memory of one that is not (`place`), without a copy."""
    return tensor.as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)


def place(param: torch.Tensor, source: Region, target: Region) -> tuple[Region, Region] | None:
    """What a copy into a live parameter reads, and where it goes in memory from the first element on.

    None where no strides say that: the parameter is laid out in another way than its loader takes it.
    """
    if param.is_contiguous():
        return source, target
    return strided(source, target, tuple(param.shape), param.stride())


def copy_regions(routes: Iterable[Route], live: Tensors, tensors: Tensors) -> None:
    """Makes the copies of `routes` into the parameters `live`. Constants are left out."""
    for route in routes:
        if route.tensor is not None and route.source is not None:
            view(live[route.param], route.target).copy_(view(tensors[route.tensor], route.source))


def load_region(param: torch.Tensor, target: Region, tensor: torch.Tensor) -> None:
    """Writes a tensor to a region of a live parameter, however that lies in memory."""
    whole = Region(0, tuple(tensor.shape), tensor.contiguous().stride())
    placed = place(param, whole, target)
    if placed is not None:
        view(param, placed[1]).copy_(view(tensor.contiguous(), placed[0]))
    else:
        in_order = param.contiguous()
        view(in_order, target).copy_(tensor)
        param.copy_(in_order)


def holds(param: torch.Tensor, route: Route, tensors: Tensors) -> bool:
    """Whether a live parameter has, bit for bit, what a route brings to it, widened where the parameter is of a wider dtype.

    False where it is laid out in another way.
    """
    if route.tensor is None or route.source is None:
        return True
    source = tensors[route.tensor]
    if not fits(param, route, dtype_name(source.dtype)):
        return False
    brought = view(source, route.source).to(param.device).to(param.dtype)
    return torch.equal(bits(view(param, route.target)), bits(brought))


def fits(param: torch.Tensor, route: Route, dtype: str) -> bool:
    """Whether a live parameter has room for what a route brings as the checkpoint has it, of this dtype, and stores every value of it."""
    room = 1 + sum((size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True))
    return param.numel() > 0 and _end(route.target) <= room and widens(dtype, dtype_name(param.dtype))


def narrowed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """What was brought in `dtype` where a parameter now holds `part`; None where that is not what widening makes of anything."""
    brought = part.to(dtype)
    if brought is part:
        return part
    return brought if torch.equal(bits(brought.to(part.dtype)), bits(part)) else None


def _end(region: Region) -> int:
    return region.offset + 1 + sum((size - 1) * step for size, step in zip(region.shape, region.stride, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor as integers: NaNs are compared by their bits, and -0.0 is not 0.0."""
    size = tensor.element_size()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
