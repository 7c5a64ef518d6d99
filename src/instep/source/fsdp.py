"""Finds the shards that FSDP keeps on a rank, in either version.

Both versions swap a module's parameters while they compute. The shards themselves stay in place.
They hold the current values even between backward and step, with gradients pending, and before the
first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from instep.plan.shards import of_range
from instep.source.local_shard import LocalShard, of_dtensor

Slot = tuple[int, str]
"""The id of a module and the name of a parameter in it."""


def shards(root: nn.Module) -> dict[Slot, LocalShard]:
    """Returns what FSDP, in either version, holds of the parameters of `root` on this rank. Tied
    parameters have one `LocalShard`."""
    return {slot: held for module in root.modules() for slot, held in _of_module(module)}


def _of_module(module: nn.Module) -> Iterator[tuple[Slot, LocalShard]]:
    if isinstance(module, FSDPModule):
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for param in (param for group in groups if group is not None for param in group.fsdp_params):
            info = param._module_info
            held = of_dtensor(info.param_name, _sharded(param))
            modules, names = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
            yield from (((id(one), name), held) for one, name in zip(modules, names, strict=True))
    elif isinstance(module, FullyShardedDataParallel):
        handle: Any = module._handle
        if handle is not None:
            yield from _of_flat_param(handle)


def _sharded(param: Any) -> Callable[[], Any]:
    return lambda: param.sharded_param


def _of_flat_param(handle: Any) -> Iterator[tuple[Slot, LocalShard]]:
    """Yields the shards of FSDP1. Its flat parameter holds the parameters one after the other, with
    padding between them and at its end, and is cut into equal parts."""
    flat_param = handle.flat_param

    def memory() -> torch.Tensor:
        # Before the first forward there is no `_local_shard`, and the flat parameter is still the
        # shard.
        shard: torch.Tensor = getattr(flat_param, "_local_shard", flat_param.data)
        return shard.detach().reshape(-1)

    size = len(memory())
    first = handle.rank * size if handle.uses_sharded_strategy else 0
    owners: dict[Slot, LocalShard] = {}
    infos, shapes, start = iter(flat_param._param_infos), iter(flat_param._shapes), 0
    for count, padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True):
        if not padding:
            info, shape = next(infos), tuple(next(shapes))
            low, high = max(start, first), min(start + count, first + size)
            extents = of_range(low - start, high - start, shape, at=low - first) if low < high else []
            owners[id(info.module), info.param_name] = LocalShard(shape, flat_param.dtype, extents, memory)
        start += count
    yield from owners.items()
    for info in flat_param._shared_param_infos:
        yield (id(info.module), info.param_name), owners[id(info.prim_module), info.prim_param_name]
