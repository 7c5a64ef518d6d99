"""The tensors of a dict, and whether it has the same ones still."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any
from weakref import ref

import torch

from instep.source.live import FACTS


class Listed:
    """Names and tensors at one moment. Keeps no tensor alive that the dict lets go.

    structure: equal to that of no other `Listed`. facts: equal for equal names of the same memory.
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
