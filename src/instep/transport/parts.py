"""Parts of tensors, and where in this process they lie."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from instep.plan.shards import Piece
from instep.protocol import ITEM_BYTES, TensorMeta, dtype_name


class Part(NamedTuple):
    """A piece of a tensor, and the memory of this process, flat, whose elements `piece.source` counts."""

    meta: TensorMeta
    memory: torch.Tensor
    piece: Piece

    @property
    def address(self) -> int:
        """The address of the part's first element."""
        return self.memory.data_ptr() + ITEM_BYTES[self.meta.dtype] * self.piece.source

    def readable(self, device: torch.device) -> bool:
        """Tells whether others can read the part where it lies: on this GPU, in the dtype to send,
        in whole words of 8 bytes."""
        memory, piece, size = self.memory, self.piece, ITEM_BYTES[self.meta.dtype]
        if memory.device != device or dtype_name(memory.dtype) != self.meta.dtype or self.address % 8:
            return False
        return not any(size * number % 8 for number in (piece.row, piece.target, piece.target_stride, piece.source_stride))


def whole(meta: TensorMeta, memory: torch.Tensor) -> Part:
    """Returns a part that is all of a tensor, at the beginning of `memory`. Readers may read past
    its end up to a whole word, so zeros must follow there."""
    return Part(meta, memory, Piece(meta.name, meta.name, 1, meta.numel, 0, meta.numel, 0, meta.numel))


def place_of(tensor: torch.Tensor) -> Hashable:
    """Returns a key that is equal for as long as a tensor lies where it lay."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
