"""Tensors that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Lazy(Mapping[str, torch.Tensor], Generic[T]):
    """Makes tensors when they are asked for, and keeps none of them. known: what each is made of, by
    its name."""

    def __init__(self, known: Mapping[str, T], make: Callable[[T], torch.Tensor]) -> None:
        self.known, self.make = known, make

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.make(self.known[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)
