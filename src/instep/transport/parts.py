"""Parts of tensors, and where in this process they lie."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from instep.plan.rows import Rows, contiguous
from instep.protocol import ITEM_BYTES, TensorMeta, dtype_name


class Part(NamedTuple):
    """Rows of a tensor, in elements, and the memory of this process, flat, that has them."""

    meta: TensorMeta
    memory: torch.Tensor
    rows: Rows

    @property
    def address(self) -> int:
        """The address of the part's first element."""
        return self.memory.data_ptr() + ITEM_BYTES[self.meta.dtype] * self.rows.place

    def readable(self, device: torch.device) -> bool:
        """Tells whether others can read the part where it lies: on this GPU, in the dtype to send,
        in whole words of 8 bytes."""
        if self.memory.device != device or dtype_name(self.memory.dtype) != self.meta.dtype:
            return False
        return self.rows.in_words(ITEM_BYTES[self.meta.dtype], self.memory.data_ptr()) is not None


def whole(meta: TensorMeta, memory: torch.Tensor) -> Part:
    """Returns a part that is all of a tensor, at the beginning of `memory`. Readers may read past
    its end up to a whole word, so zeros must follow there."""
    return Part(meta, memory, contiguous(meta.numel, 0))


def place_of(tensor: torch.Tensor) -> Hashable:
    """Returns a key that is equal for as long as a tensor lies where it lay."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
