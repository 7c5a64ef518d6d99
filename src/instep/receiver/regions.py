"""Copies regions of tensors, and compares them bit by bit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from instep.plan.dtypes import widens
from instep.plan.region import strided, view
from instep.protocol import Region, Route, WorkerPlan, dtype_name
from instep.receiver.lazy import each

Tensors = Mapping[str, torch.Tensor]


def offered(plan: WorkerPlan, names: Collection[str | None], tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields some of the tensors, in their order, as an initial load gives them to the engine's
    loader.

    Those that the loader computes with are in host memory: the same arithmetic on a GPU rounds
    differently (an exponential differs in the last bit). Those that it writes into are copies.
    """
    overwritten = {*plan.overwritten}
    for name, tensor in each(tensors, [name for name in tensors if name in names]):
        given = tensor.cpu() if name in plan.computed else tensor
        yield name, given.clone() if name in overwritten else given


def place(param: torch.Tensor, source: Region, target: Region) -> tuple[Region, Region] | None:
    """Returns what a copy into a live parameter reads, and where it goes in memory, counted from
    the parameter's first element.

    None where no strides express that: the parameter is laid out in another way than its loader
    takes it.
    """
    if param.is_contiguous():
        return source, target
    return strided(source, target, tuple(param.shape), param.stride())


def copy_regions(routes: Iterable[Route], live: Tensors, tensors: Tensors) -> None:
    """Copies regions into the parameters `live`, one for each route. Routes of constants are
    skipped."""
    for route in routes:
        if route.tensor is not None and route.source is not None:
            view(live[route.param], route.target).copy_(view(tensors[route.tensor], route.source))


def load_region(param: torch.Tensor, target: Region, tensor: torch.Tensor) -> None:
    """Writes a tensor to a region of a live parameter, whatever the parameter's strides."""
    whole = Region(0, tuple(tensor.shape), tensor.contiguous().stride())
    placed = place(param, whole, target)
    if placed is not None:
        view(param, placed[1]).copy_(view(tensor.contiguous(), placed[0]))
    else:
        in_order = param.contiguous()
        view(in_order, target).copy_(tensor)
        param.copy_(in_order)


def holds(param: torch.Tensor, route: Route, tensors: Tensors) -> bool:
    """Whether a live parameter has, bit for bit, what a route brings. The tensor is widened if the
    parameter's dtype is wider.

    Returns False for a parameter in another layout.
    """
    if route.tensor is None or route.source is None:
        return True
    source = tensors[route.tensor]
    if not fits(param, route, dtype_name(source.dtype)):
        return False
    brought = view(source, route.source).to(param.device).to(param.dtype)
    return torch.equal(bits(view(param, route.target)), bits(brought))


def fits(param: torch.Tensor, route: Route, dtype: str) -> bool:
    """Whether a live parameter is large enough for what a route brings, in checkpoint layout, and
    its dtype stores every value of `dtype`."""
    room = 1 + sum((size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True))
    return param.numel() > 0 and extends_to(route.target) <= room and widens(dtype, dtype_name(param.dtype))


def narrowed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns `part` of a parameter in the `dtype` in which it was brought. None where no value of
    that dtype widens to it."""
    brought = part.to(dtype)
    if brought is part:
        return part
    return brought if torch.equal(bits(brought.to(part.dtype)), bits(part)) else None


def extends_to(region: Region) -> int:
    """Returns one more than the last element of a region that is not empty."""
    return region.offset + 1 + sum((size - 1) * step for size, step in zip(region.shape, region.stride, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same tensor as integers: NaNs are compared by their bits, and -0.0 is not 0.0."""
    size = tensor.element_size()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
