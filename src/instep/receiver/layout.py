"""A model in checkpoint layout: tensors that have shapes and no bytes stand in for its own, while a loader is traced."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Layout:
    """What a host knows of its model in checkpoint layout. This one: every write reaches its parameter."""

    def wrote(self, tensor: torch.Tensor, *, copied: bool) -> None:
        """Told of each write of the loader. tensor: a view of a parameter or buffer. copied: by `copy_`, not by a fill or in place."""

    def replaced(self, param: str) -> None:
        """Told of each parameter or buffer for which the loader has put another tensor in place."""

    def unnoticed(self) -> Collection[str]:
        """Layers, of those that were written, that a reload session would leave as they are: the loader writes past what it looks at."""
        return ()


@contextmanager
def shape_only(model: nn.Module) -> Iterator[Layout]:
    """Within it every parameter and buffer has a shape and no bytes; afterwards the live ones are back.

    The checkpoint layout of a model that keeps its tensors as its loader takes them. There they are
    contiguous: a region of a tensor counts its elements in order, however it lies in memory.
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
    """A contiguous tensor of the same class, shape, dtype and attributes, without bytes. Of integers
    it is a copy with bytes: loaders read maps of experts to find out what goes where."""
    made = _shape_of(tensor) if tensor.is_meta or tensor.dtype.is_floating_point else tensor.detach().clone()
    made.__class__ = tensor.__class__
    made.__dict__ = tensor.__dict__.copy()
    return made


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
