"""Weights that a module computes from other tensors whenever it uses them, as `weight_norm` does:
an engine gets what comes out.

`torch.nn.utils.parametrize` computes the weights on access. The older hooks
(`torch.nn.utils.weight_norm`, `spectral_norm`, `prune`) compute them before each forward, so
between two forwards the module may hold weights of an earlier step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from instep.errors import SourceError

HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)
PARTS = ("_g", "_v", "_u", "_orig", "_mask")
"""What hooks add to a weight's name for the tensors from which they compute it."""
PARAMETRIZATIONS = "parametrizations"


def computed(module: nn.Module) -> list[str]:
    """Returns the names of a module's own weights that it computes from others."""
    return [*(getattr(module, PARAMETRIZATIONS) if parametrize.is_parametrized(module) else ()), *(name for name, _ in _hooks(module))]


def without(twin: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Replaces what `twin` computes by tensors on the meta device, in the shapes and dtypes of
    `values`. twin: a private copy of the module's structure."""
    if parametrize.is_parametrized(twin):
        twin._modules.pop(PARAMETRIZATIONS)
        twin.__class__ = parametrize.type_before_parametrizations(twin)
    for name, value in values.items():
        vars(twin).pop(name, None)
        for held in (twin._parameters, twin._buffers):
            for part in PARTS:
                held.pop(f"{name}{part}", None)
        twin._parameters[name] = nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device="meta"), requires_grad=False)


def values(path: str, module: nn.Module, private: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """Computes a module's weights as its forward outside of training would.

    private: makes a copy of the module that may be changed. Raises `SourceError` where they cannot
    be computed.
    """
    try:
        with torch.no_grad():
            return dict(_values(module, private()))
    except Exception as error:
        raise SourceError(f"the weights of {path} are parametrized and cannot be computed: {error}", tensor=path) from error


def _values(module: nn.Module, copy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for part in copy.modules():
        part.training = False  # in training mode each use changes a spectral norm's state
    for name in getattr(copy, PARAMETRIZATIONS) if parametrize.is_parametrized(module) else ():
        yield name, copy.parametrizations[name]().detach()
    for name, hook in _hooks(module):
        hook(copy, ())
        yield name, getattr(copy, name).detach()


def _hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, HOOKS):
            yield hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name, hook
