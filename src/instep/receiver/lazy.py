"""Tensors that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Lazy(Mapping[str, torch.Tensor], Generic[T]):
    """Makes tensors when they are asked for, and keeps none of them. known: what each is made of,
    by its name. together: makes many, in order, in less time than `make` takes for each."""

    def __init__(
        self,
        known: Mapping[str, T],
        make: Callable[[T], torch.Tensor],
        together: Callable[[Sequence[T]], Iterator[torch.Tensor]] | None = None,
    ) -> None:
        self.known, self.make, self.together = known, make, together

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.make(self.known[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


def each(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields these tensors, made as few at a time as their maker wants."""
    if isinstance(tensors, Lazy) and tensors.together is not None:
        yield from zip(names, tensors.together([tensors.known[name] for name in names]), strict=True)
    else:
        yield from ((name, tensors[name]) for name in names)
