"""Remembers the tensors of a live module or of a dict, to tell whether they are still the same.
Each push checks that, so the loops run in C."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_, itemgetter
from typing import Any
from weakref import ref

import torch
from torch import nn

from instep.source.bare import adapter_state, adapters, applies_adapters

REGISTRIES = itemgetter("_modules", "_parameters", "_buffers")
FACTS = (torch.Tensor.data_ptr, torch.Tensor.stride, *(getattr(torch.Tensor, fact).__get__ for fact in ("shape", "dtype", "device")))
"""The parts of `identity`. Reading part by part takes half the time of tensor by tensor."""


class Live:
    """Every parameter and persistent buffer of a module, under the names it has with wrappers and
    adapters in place.

    names, tensors: in the model's order; a tied tensor is listed under each of its names.
    structure: an object that no other `Live` has.
    """

    def __init__(self, root: nn.Module) -> None:
        self.names, self.tensors = list[str](), list[torch.Tensor]()
        for path, module in root.named_modules(remove_duplicate=False):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    self.names.append(f"{path}.{name}" if path else name)
                    self.tensors.append(tensor)
        self.structure = object()
        self._root = root
        modules = list(root.modules())
        self._attributes = [vars(module) for module in modules]
        self._adapters = adapters(modules)
        self._registries = self._filled()
        self._sizes = list(map(len, self._registries))
        self._keys = list(chain.from_iterable(self._registries))
        self._objects = list(chain.from_iterable(map(dict.values, self._registries)))
        self._with_buffers = [module for module in modules if module._buffers]
        self._facts = (self._not_saved(), adapter_state(self._adapters))
        self._identities = [list(map(fact, self.tensors)) for fact in FACTS]

    def holds(self, root: nn.Module) -> bool:
        """Whether `root` still is this module. Submodules and tensors must be the same objects
        under the same names. Tensors must have the same memory, shapes, strides and dtypes.
        Adapters must be in the same state."""
        filled = self._filled()
        return (
            root is self._root
            and len(filled) == len(self._registries)
            and _same(filled, self._registries)
            and list(map(len, filled)) == self._sizes
            and list(chain.from_iterable(filled)) == self._keys
            and _same(chain.from_iterable(map(dict.values, filled)), self._objects)
            and (self._not_saved(), adapter_state(self._adapters)) == self._facts
            and all(list(map(fact, self.tensors)) == known for fact, known in zip(FACTS, self._identities, strict=True))
        )

    def applies_adapters(self) -> bool:
        return applies_adapters(self._adapters)

    def _filled(self) -> list[dict[str, Any]]:
        """Returns the registries of all modules that are not empty."""
        return list(filter(None, chain.from_iterable(map(REGISTRIES, self._attributes))))

    def _not_saved(self) -> list[set[str]]:
        return [set(module._non_persistent_buffers_set) for module in self._with_buffers]


def _same(found: Iterable[Any], known: Iterable[Any]) -> bool:
    return all(map(is_, found, known))


class Listed:
    """Names and tensors of a dict at one moment. Tensors are held by weak references.

    structure: an object that no other `Listed` has. facts: equal for equal names of the same
    memory.
    """

    def __init__(self, mapping: Mapping[Any, torch.Tensor]) -> None:
        self.structure = object()
        self.facts = _facts(mapping)
        self._tensors = list(map(ref, mapping.values()))

    def holds(self, mapping: Mapping[Any, Any]) -> bool:
        """Whether the names are the same, and each tensor is the same object in the same memory."""
        if len(mapping) != len(self._tensors) or not all(map(is_, mapping.values(), (found() for found in self._tensors))):
            return False
        return _facts(mapping) == self.facts


def _facts(mapping: Mapping[Any, torch.Tensor]) -> tuple[tuple[Any, ...], ...]:
    return tuple(mapping), *(tuple(map(fact, mapping.values())) for fact in FACTS)
