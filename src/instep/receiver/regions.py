"""Regions of tensors: copied, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from instep.protocol import Region, Route, dtype_name

Tensors = Mapping[str, torch.Tensor]


def view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """`region` of a contiguous tensor, without a copy."""
    return tensor.as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)


def copy_regions(routes: Iterable[Route], live: Tensors, tensors: Tensors) -> None:
    """Makes the copies of `routes` into the parameters `live`. Constants are left out."""
    for route in routes:
        if route.tensor is not None and route.source is not None:
            view(live[route.param], route.target).copy_(view(tensors[route.tensor], route.source))


def holds(param: torch.Tensor, route: Route, tensors: Tensors) -> bool:
    """Whether a live parameter has, bit for bit, what a route brings to it. False where it is laid out in another way."""
    if route.tensor is None or route.source is None:
        return True
    source = tensors[route.tensor]
    if not fits(param, route, dtype_name(source.dtype)):
        return False
    return torch.equal(bits(view(param, route.target)), bits(view(source, route.source).to(param.device)))


def fits(param: torch.Tensor, route: Route, dtype: str) -> bool:
    """Whether a live parameter has room for what a route brings as the checkpoint has it, of this dtype."""
    return dtype_name(param.dtype) == dtype and param.is_contiguous() and _end(route.target) <= param.numel()


def _end(region: Region) -> int:
    return region.offset + 1 + sum((size - 1) * step for size, step in zip(region.shape, region.stride, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor as integers: NaNs are compared by their bits, and -0.0 is not 0.0."""
    size = tensor.element_size()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
