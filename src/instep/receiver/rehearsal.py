"""Made-up weights for a reload session that goes before the one with the real weights.

They have the names, shapes and dtypes of the real ones, and differ from what models have in every
element and in every simple statistic. They need none of the trainer's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from instep.digest import seed_of
from instep.protocol import TensorMeta
from instep.receiver.regions import bits

PERIOD = 8191
"""A prime: rows of a matrix differ from each other, whatever their length."""


class Scrambled(Mapping[str, torch.Tensor]):
    """Tensors of the given names, shapes and dtypes, made when they are asked for. An alias has the
    values of the tensor that it stands for.

    Numbers are from 16 to 32, in a different order for each tensor; with `turn=1` from 32 to 64.
    Integers are zeros, which are valid as indices.
    """

    def __init__(self, metas: Iterable[TensorMeta], device: str, turn: int = 0) -> None:
        self.metas, self.device = {meta.name: meta for meta in metas}, device
        order = torch.arange(PERIOD, device=device, dtype=torch.int64) * 3001 % PERIOD
        self._numbers = 2**turn * (16 + 16 * order.to(torch.float32) / PERIOD)

    def __getitem__(self, name: str) -> torch.Tensor:
        meta = self.metas[name]
        dtype: torch.dtype = getattr(torch, meta.dtype)
        if not dtype.is_floating_point:
            return torch.zeros(meta.shape, dtype=dtype, device=self.device)
        start = seed_of(self.metas[meta.alias_of or name]) % PERIOD
        period = bits(self._numbers.roll(-start).to(dtype))
        return period.repeat(-(-meta.numel // PERIOD))[: meta.numel].view(dtype).view(meta.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.metas)

    def __len__(self) -> int:
        return len(self.metas)
