"""Made-up weights for a reload session that goes before the one with the real weights.

They have the names, shapes and dtypes of the real ones, and differ from what models have in every
element and in every simple statistic. They need none of the trainer's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from instep.digest import seed_of
from instep.protocol import TensorMeta
from instep.receiver.lazy import Lazy
from instep.receiver.regions import Tensors, bits

PERIOD = 8191
"""A prime: rows of a matrix differ from each other, whatever their length."""


def scrambled(tensors: Iterable[TensorMeta], device: str, turn: int = 0) -> Tensors:
    """Returns tensors of the given names, shapes and dtypes, made when they are asked for. An alias
    has the values of the tensor that it stands for.

    Numbers are from 16 to 32, in a different order for each tensor; with `turn=1` from 32 to 64.
    Integers are zeros, which are valid as indices.
    """
    metas = {meta.name: meta for meta in tensors}
    order = torch.arange(PERIOD, device=device, dtype=torch.int64) * 3001 % PERIOD
    numbers = 2**turn * (16 + 16 * order.to(torch.float32) / PERIOD)

    @cache
    def repeated(dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([numbers, numbers]).to(dtype)

    def made(meta: TensorMeta) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, meta.dtype)
        if not dtype.is_floating_point:
            return torch.zeros(meta.shape, dtype=dtype, device=device)
        start = seed_of(metas[meta.alias_of or meta.name]) % PERIOD
        if meta.numel <= PERIOD:  # one copy: there may be tens of thousands of them
            return repeated(dtype)[start : start + meta.numel].clone().view(meta.shape)
        period = bits(repeated(dtype)[start : start + PERIOD])
        return period.repeat(-(-meta.numel // PERIOD))[: meta.numel].view(dtype).view(meta.shape)

    return Lazy(metas, made)
