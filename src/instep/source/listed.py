"""Remembers the tensors of a dict, to tell whether the dict still has the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any
from weakref import ref

import torch

from instep.source.live import FACTS


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
