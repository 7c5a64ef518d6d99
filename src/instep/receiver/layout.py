"""A model in checkpoint layout: tensors that have shapes and no bytes stand in for its own, while a
loader is traced."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Layout:
    """What a host knows of its model in checkpoint layout. In this class every write reaches its
    parameter."""

    def wrote(self, tensor: torch.Tensor, *, copied: bool) -> None:
        """Records a write of the loader. tensor: a view of a parameter or buffer. copied: whether
        by `copy_`, and not by a fill or in place."""

    def replaced(self, param: str) -> None:
        """Records a parameter or buffer that the loader has replaced by another tensor."""

    def unnoticed(self) -> Collection[str]:
        """Returns those written layers that a reload session would leave as they are, because the
        loader writes past what the session tracks."""
        return ()


@contextmanager
def shape_only(model: nn.Module) -> Iterator[Layout]:
    """Replaces every parameter and buffer by a tensor on the meta device within its block.
    Afterwards the live ones are back.

    This is the checkpoint layout of a model that keeps its tensors as its loader takes them. The
    stand-ins are contiguous: a region of a tensor counts its elements in order, whatever the
    strides.
    """
    live = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        for module, parameters, buffers in live:
            for name, param in parameters.items():
                if param is not None:
                    module._parameters[name] = nn.Parameter(_shape_of(param), requires_grad=False)
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = _shape_of(buffer)
        yield Layout()
    finally:
        for module, parameters, buffers in live:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor on the meta device with the same class, shape, dtype and
    attributes. A tensor of integers is copied instead: loaders read expert maps to find out what
    goes where."""
    made = _shape_of(tensor) if tensor.is_meta or tensor.dtype.is_floating_point else tensor.detach().clone()
    made.__class__ = tensor.__class__
    made.__dict__ = tensor.__dict__.copy()
    return made


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
