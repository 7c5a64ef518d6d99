"""Compares what two models hold at the same places, and lists where they differ.

Tensors are compared bit by bit, numbers and text by value. Objects are alike if what they hold is
alike: their identity says nothing, because no two models share objects.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from instep.receiver.evidence import CONTAINERS, PLAIN, children, is_plain, is_wrapper, of_module
from instep.receiver.regions import bits

ABSENT = object()
Kind = tuple[str, str]
"""A module's class, and the attribute path from a module of that class."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where two models differ. layer: the live module's name. way: the attribute path from
    there. live: what is held there. fresh: a copy of what a second model holds there. registered:
    whether it is a parameter or a buffer."""

    layer: str
    way: str
    kind: Kind
    live: object
    fresh: object
    registered: bool


def differences(live: nn.Module, fresh: nn.Module, unit: Mapping[str, str], stops: Container[int]) -> tuple[list[Difference], set[str]]:
    """Returns the places where modules of `live` and `fresh` differ, and the names of live modules
    that cannot be compared. Those keep state outside of PyTorch and hold its address.

    stops: `ids` of the two models, which a caller with many units works out once.
    """
    found, hidden = [], set()
    for name, place in differing(live, fresh, unit, stops):
        if place is None:
            hidden.add(unit[name])
            continue
        way, held, value = place
        registered = is_registered(fresh, name, way) and isinstance(value, torch.Tensor)
        kind = type(fresh.get_submodule(name)).__qualname__, way
        found.append(Difference(unit[name], way, kind, held, _copy(value), registered))
    return found, hidden


def is_registered(model: nn.Module, name: str, way: str) -> bool:
    """Whether an attribute path from a module is that of a parameter or a buffer."""
    module = model.get_submodule(name)
    return way in module._parameters or way in module._buffers


def differing(
    live: nn.Module, fresh: nn.Module, unit: Mapping[str, str], stops: Container[int]
) -> Iterator[tuple[str, tuple[str, object, object] | None]]:
    """Yields each place where modules of two models differ: the module's name in `fresh`, and the
    attribute path with what both hold there. Yields None instead for a module's state outside of
    PyTorch, whose address it holds."""
    for name, known_as in unit.items():
        for way, held, value in _pairs(live.get_submodule(known_as), fresh.get_submodule(name), stops):
            if isinstance(value, torch.ScriptObject) or (_is_address(value) and not alike(held, value)):
                yield name, None
            elif _is_value(value) and not alike(held, value):
                yield name, (way, held, value)


def other_values(live: nn.Module, other: nn.Module, unit: Mapping[str, str], found: Sequence[Difference]) -> list[object]:
    """Returns what a third model holds at the places of differences."""
    names = {known_as: name for name, known_as in unit.items()}
    values: dict[tuple[str, str], object] = {}
    stops = ids(live, other)
    for layer in {one.layer for one in found}:
        pairs = _pairs(live.get_submodule(layer), other.get_submodule(names[layer]), stops)
        wanted = {one.way for one in found if one.layer == layer}
        values |= {(layer, way): _copy(value) for way, _, value in pairs if way in wanted}
    return [values.get((one.layer, one.way), ABSENT) for one in found]


def is_undetermined(one: Difference, second: object) -> bool:
    """Whether two models differ only in what an initial load leaves undetermined: uninitialized
    elements of a tensor, or a mark of an object such as its creation time. second: what another
    load of the same weights has left at that place."""
    tensors = (one.live, one.fresh, second)
    if not any(isinstance(value, torch.Tensor) for value in tensors):
        return second is not ABSENT and not alike(one.fresh, second)
    if not all(isinstance(value, torch.Tensor) for value in tensors):
        return False
    live, fresh, other = (value for value in tensors if isinstance(value, torch.Tensor))
    if not live.shape == fresh.shape == other.shape or not live.dtype == fresh.dtype == other.dtype or live.is_meta:
        return False
    live, fresh, other = _bits(live), _bits(fresh), _bits(other)
    return bool(((live == fresh) | (fresh != other)).all())


def alike(one: object, other: object) -> bool:
    """Whether two values are equal. Tensors are compared bit by bit, whatever their strides and
    devices."""
    if not _same_type(one, other):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.shape, one.dtype, one.is_meta) != (other.shape, other.dtype, other.is_meta):
            return False
        return one.is_meta or torch.equal(_bits(one), _bits(other).to(one.device))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    return one == other or repr(one) == repr(other)  # so that a NaN equals itself


def _pairs(live: nn.Module, fresh: nn.Module, stops: Container[int]) -> Iterator[tuple[str, object, object]]:
    """Yields each place that `fresh` leads to, with what both models hold there. An object that
    both share is left out.

    stops: ids of modules, which are compared under their own names.
    """
    seen: set[tuple[int, int]] = set()
    alive: list[object] = []  # so that no id is reused
    left = list(_both(dict(of_module(live)), dict(of_module(fresh)), ""))
    while left:
        way, one, other = left.pop()
        if one is other or id(other) in stops or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        alive += [one, other]
        yield way, one, other
        try:
            left += _both(dict(children(one, stops)) if _same_type(one, other) else {}, dict(children(other, stops)), way)
        except Exception:  # the object cannot be inspected
            continue


def _same_type(one: object, other: object) -> bool:
    return type(one) is type(other) or (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor))


def _both(live: Mapping[str, object], fresh: Mapping[str, object], way: str) -> Iterator[tuple[str, object, object]]:
    return ((way + name, live.get(name, ABSENT), value) for name, value in fresh.items())


def ids(*models: nn.Module) -> set[int]:
    """Returns the ids of all modules, at which a comparison stops."""
    return {id(module) for model in models for module in model.modules()}


def _is_value(value: Any) -> bool:
    """Whether a value is compared itself. A tensor on the meta device has nothing to compare."""
    if isinstance(value, torch.Tensor):
        return not value.is_meta and not is_wrapper(value)
    if isinstance(value, CONTAINERS):
        return is_plain(value)
    return isinstance(value, (*PLAIN, float, complex, np.generic, np.ndarray))


def _is_address(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.int64 and not value.shape and not value.is_meta


def _copy(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    with torch._C.DisableTorchFunctionSubclass():
        return bits(tensor)
