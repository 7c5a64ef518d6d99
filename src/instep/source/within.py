"""Finds parts of a source that may be what an engine wants: a model inside the user's own wrapper,
or names that share a prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from msgspec import structs
from torch import nn

from instep.errors import InstepError
from instep.protocol import TensorMeta
from instep.source.bare import unwrap
from instep.source.names import canonical

DEPTH = 3
SHARE = 8
"""A module that holds less than 1/SHARE of the source is not taken for the model."""


class Within(NamedTuple):
    """A part of a source. what: its description. how: a line of code that pushes it. tensors: its
    tensors."""

    what: str
    how: str
    tensors: list[TensorMeta]


def modules(root: nn.Module, metadata: Callable[[nn.Module], list[TensorMeta]]) -> Iterator[list[Within]]:
    """Yields large modules inside of `root`, one list for each depth, the outer ones first.

    metadata: tells the checkpoint tensors of one.
    """
    paths = {id(module): path for path, module in root.named_modules()}
    least, level = _size(root) / SHARE, [root]
    for _ in range(DEPTH):
        children = [child for module in level for child in unwrap(module).children()]
        level = [child for child in children if _size(child) >= least and id(child) in paths]
        found = []
        for child in level:
            try:
                found.append(_inside(child, paths[id(child)], metadata(child)))
            except InstepError:  # this module cannot be pushed
                continue
        yield found


def prefixed(tensors: Sequence[TensorMeta]) -> Iterator[list[Within]]:
    """Yields tensors whose names share a prefix, named without it. Shorter prefixes come first."""
    for level in _below(tensors):
        yield [Within(f"the tensors below `{prefix}`, named without that", _pairs(prefix), found) for prefix, found in level.items()]


def below(root: nn.Module, tensors: Sequence[TensorMeta]) -> Iterator[list[Within]]:
    """Yields what `modules` does, but tells tensors apart by their names instead of asking each
    module for its own."""
    paths = {canonical(path): path for path, _ in root.named_modules()}
    for level in _below(tensors):
        inner = {paths[prefix[:-1]]: found for prefix, found in level.items() if prefix[:-1] in paths}
        yield [_inside(root.get_submodule(path), path, found) for path, found in inner.items()]


def _inside(module: nn.Module, path: str, tensors: list[TensorMeta]) -> Within:
    return Within(f"the {type(unwrap(module)).__name__} in `{path}`", f"WeightSync(source=source.{path})", tensors)


def _below(tensors: Sequence[TensorMeta]) -> Iterator[dict[str, list[TensorMeta]]]:
    """Yields, for each depth, the tensors below each prefix that ends with a dot, named without the
    prefix."""
    for depth in range(1, DEPTH + 1):
        starts = (meta.name.split(".") for meta in tensors)
        prefixes = Counter(".".join(parts[:depth]) + "." for parts in starts if len(parts) > depth)
        yield {prefix: _without(prefix, tensors) for prefix, count in prefixes.items() if count * SHARE >= len(tensors)}


def _without(prefix: str, tensors: Sequence[TensorMeta]) -> list[TensorMeta]:
    kept = [meta for meta in tensors if meta.name.startswith(prefix)]
    names = {meta.name for meta in kept}
    return [
        structs.replace(
            meta,
            name=meta.name.removeprefix(prefix),
            alias_of=meta.alias_of.removeprefix(prefix) if meta.alias_of in names else None,
        )
        for meta in kept
    ]


def _pairs(prefix: str) -> str:
    pairs = f"{{name.removeprefix({prefix!r}): tensor for name, tensor in source.items() if name.startswith({prefix!r})}}"
    return f"WeightSync(source={pairs})"


def _size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
