"""What this rank holds of one live tensor, whatever the way a trainer shards it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from instep.errors import SourceError
from instep.plan.shards import Extent, Interval, everything, of_intervals


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """shape, dtype: of the whole tensor. extents: what of it lies in `memory()`.

    local: the tensor that this rank has, looked up at each call, because trainers move and swap
    their storage.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    extents: list[Extent]
    local: Callable[[], torch.Tensor]

    def memory(self) -> torch.Tensor:
        """Returns this rank's part as a flat tensor: a view of contiguous memory, or a copy."""
        return self.local().detach().contiguous().reshape(-1)


def whole(get: Callable[[], torch.Tensor]) -> LocalShard:
    """Returns the `LocalShard` of a tensor that every rank has in full."""
    tensor = get()
    return LocalShard(tuple(tensor.shape), tensor.dtype, everything(tensor.shape), get)


def of_dtensor(name: str, get: Callable[[], Any]) -> LocalShard:
    """Returns the `LocalShard` of a `DTensor`. Raises `SourceError` for one with a partial
    placement, whose values are still to be reduced."""
    tensor = get()
    intervals = local_intervals(name, tensor)
    # A mesh may leave this rank out, and small dimensions may leave it nothing.
    extents = of_intervals(intervals) if intervals is not None and all(intervals) else []
    return LocalShard(tuple(tensor.shape), tensor.dtype, extents, lambda: get()._local_tensor)


def local_intervals(name: str, tensor: Any) -> list[list[Interval]] | None:
    """Returns, for each dimension, the indices that this rank has, as intervals in order. None for
    a rank outside of the mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    indices = [torch.arange(size) for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise SourceError(f"{name} has placement {placement}: its values are still to be reduced", tensor=name)
        if not placement.is_replicate():
            # PyTorch splits the indices of one dimension as it would split the tensor.
            # FSDP over tensor parallelism has a placement with one more argument.
            more = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
            own = type(placement)(0, **more)
            parts, _ = own._split_tensor(indices[placement.dim], tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=False)
            indices[placement.dim] = parts[coordinate[mesh_dim]]
    return [_intervals(some) for some in indices]


def _intervals(indices: torch.Tensor) -> list[Interval]:
    if not len(indices):
        return []
    breaks = ((indices[1:] - indices[:-1]) != 1).nonzero().reshape(-1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in torch.tensor_split(indices, breaks.tolist())]
