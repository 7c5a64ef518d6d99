"""Finds a rank's ZeRO-3 partitions. They are equal ranges of each parameter's flat index space, the
last ones padded.

A parameter with `ds_id` is partitioned. The parameter itself is a placeholder, or whole for as long
as a layer computes. The other stages leave every rank the whole parameters.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from instep.errors import SourceError
from instep.plan.shards import of_range
from instep.source.local_shard import LocalShard


def partitioned(param: Any) -> bool:
    return hasattr(param, "ds_id") and getattr(param, "ds_tensor", None) is not None


def partition(name: str, param: Any) -> LocalShard:
    shape, count = tuple(param.ds_shape), int(param.ds_tensor.ds_numel)
    group = getattr(param, "ds_process_group", None)  # what is no process group stands for all ranks
    rank = torch.distributed.get_rank(group if isinstance(group, torch.distributed.ProcessGroup) else None)
    low = rank * count
    high = min(low + count, math.prod(shape))

    def memory() -> torch.Tensor:
        tensor = param.ds_tensor
        if hasattr(tensor, "ds_quant_scale"):
            raise SourceError(f"{name} is partitioned in quantised form", tensor=name, next_step="switch zero_quantized_weights off")
        if tensor.numel() < count:
            raise SourceError(f"the partition of {name} is not in memory: it was swapped out", tensor=name, next_step="push from memory")
        flat: torch.Tensor = tensor.detach().reshape(-1)
        return flat

    return LocalShard(shape, param.ds_tensor.dtype, of_range(low, high, shape) if low < high else [], memory)


def engine_module(module: Any) -> Any:
    """Returns the module in a `DeepSpeedEngine`, or None for any other object."""
    # An engine can only exist where DeepSpeed has been imported, so nothing is imported here.
    deepspeed = sys.modules.get("deepspeed")
    return module.module if deepspeed is not None and isinstance(module, deepspeed.DeepSpeedEngine) else None
