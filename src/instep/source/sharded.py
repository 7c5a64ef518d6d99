"""A module whose tensors lie in several processes: what this process holds of each checkpoint
tensor.

Most checkpoint tensors are live tensors, or boxes of them, and their bytes are copied straight to
where they are wanted. The others are *made*: an adapter is merged into them, or the checkpoint
format joins them. For those, the live tensors that they are made of are gathered, one group at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import groupby
from typing import Any

import msgspec
import torch
from torch import nn

from instep.plan.region import Box
from instep.plan.shards import Piece, ordered_box, pieces
from instep.protocol import TensorMeta, dtype_name
from instep.source.bare import adapters, applies_adapters, merge
from instep.source.layout import Saved
from instep.source.skeleton import Skeleton, structure
from instep.source.snapshot import checkpoint, read
from instep.source.tensors import versions
from instep.source.within import Within, below

Whole = Callable[[list[str]], dict[str, torch.Tensor]]
"""Gathers live tensors, given by name. The caller may write to them."""


class Description(msgspec.Struct, frozen=True):
    """What a rank reports about its part of the model.

    tensors: the checkpoint tensors, the same on every rank. pieces: what this rank holds of those
    that are not in `made`.
    parts: the live tensors that those in `made` are made of. part_pieces: what this rank holds of
    `parts`.
    """

    tensors: list[TensorMeta]
    pieces: list[Piece]
    made: list[str]
    parts: list[TensorMeta]
    part_pieces: list[Piece]


class Told(msgspec.Struct, frozen=True):
    """A rank's description, or None if the last one still holds."""

    description: Description | None


class ShardedModule:
    """What this rank holds of a module: FSDP1 and 2, ZeRO-3, tensor parallelism, ignored and
    replicated parts, adapters.

    Names, dtypes and values are those of `ModuleSource` for the gathered module. Raises
    `SourceError` for what cannot be read.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._taken: _Taken | None = None
        self._structure: Hashable = None

    def describe(self) -> Description:
        """Returns the same object for as long as the structure does not change."""
        return self._current().description

    def memory(self, live: str) -> torch.Tensor:
        """Returns this rank's current part of a live tensor, flat. `Piece.source` is an index into
        it."""
        assert self._taken is not None
        return self._taken.held[live].memory()

    def local(self, live: str) -> torch.Tensor:
        """Returns this rank's part of a live tensor as the trainer has it. Where that is
        contiguous, `memory` is a view of it."""
        assert self._taken is not None
        return self._taken.held[live].local()

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors when they were described last."""
        assert self._taken is not None
        return next(iter(self._taken.held.values())).local().device

    @property
    def merged(self) -> bool:
        """Tells whether the current values have an adapter merged into them."""
        return applies_adapters(adapters(self._module.modules()))

    def stamp(self) -> Hashable:
        """Returns a stamp that misses changes through `tensor.data`, because PyTorch does not count
        those."""
        taken = self._current()
        return id(taken), versions(held.local() for held in taken.held.values())

    def within(self) -> Iterator[list[Within]]:
        """Yields what else could be pushed, as far as names show it. Other ranks are not asked."""
        return below(self._module, self._current().description.tensors)

    def make(self, name: str, whole: Whole) -> dict[str, torch.Tensor]:
        """Computes the group of made checkpoint tensors that `name` belongs to."""
        assert self._taken is not None
        return self._taken.make(name, whole)

    def _current(self) -> _Taken:
        seen = structure(self._module)
        if self._taken is None or seen != self._structure or not self._taken.skeleton.fits():
            self._taken = None  # also where the new structure is refused
            self._taken, self._structure = _Taken(self._module), seen
        return self._taken


class _Taken:
    """A module's structure at one moment."""

    def __init__(self, root: nn.Module) -> None:
        self.skeleton = Skeleton(root)
        self.module, self.state, self.adapters, saved = checkpoint(self.skeleton.module, id)
        self.names = self.skeleton.names
        self.held = {name: self.skeleton.held[key] for key, name in self.names.items()}
        self.groups: dict[str, tuple[tuple[str, ...], list[Saved]]] = {}
        found: list[Piece] = []
        for parts, group in groupby((one for one in saved if one.meta.alias_of is None), key=lambda one: one.parts):
            members = list(group)
            boxes = [self._box(one) for one in members]
            if any(box is None for box in boxes):
                self.groups |= {one.meta.name: (parts, members) for one in members}
                continue
            live = self.names[id(self.state[parts[0]])]
            for one, box in zip(members, boxes, strict=True):
                found += pieces(one.meta.name, live, box, self.held[live].extents)  # type: ignore[arg-type]
        needed = dict.fromkeys(name for parts, _ in self.groups.values() for name in self._needed(parts))
        metas = [TensorMeta(name, dtype_name(self.held[name].dtype), self.held[name].shape) for name in needed]
        held = [piece for name in needed for piece in pieces(name, name, _all(self.held[name].shape), self.held[name].extents)]
        self.description = Description([one.meta for one in saved], found, list(self.groups), metas, held)

    def _box(self, one: Saved) -> Box | None:
        """Returns a checkpoint tensor's box of its live tensor; None for a tensor that is made."""
        if one.view is None or len(one.parts) != 1 or one.parts[0] in self.adapters:
            return None
        shape = tuple(self.state[one.parts[0]].shape)
        return _all(shape) if one.whole else ordered_box(one.view, shape)

    def _needed(self, parts: tuple[str, ...]) -> list[str]:
        """Returns the names of the live tensors that go into a group."""
        found = []
        for part in parts:
            found += self._of_adapter(self.adapters[part][1]) if part in self.adapters else [self.names[id(self.state[part])]]
        return found

    def _of_adapter(self, layer: Any) -> list[str]:
        return [self.names[id(tensor)] for tensor in (*layer.parameters(), *layer.buffers()) if id(tensor) in self.names]

    def make(self, name: str, whole: Whole) -> dict[str, torch.Tensor]:
        parts, group = self.groups[name]
        values = whole(list(dict.fromkeys(self._needed(parts))))
        by_id = {key: values[name] for key, name in self.names.items() if name in values}
        merged = {
            path: merge(path, layer, by_id) for path, layer in dict(self.adapters[part] for part in parts if part in self.adapters).items()
        }
        given = {}
        for part in parts:
            if part in self.adapters:
                path = self.adapters[part][0]
                given[part] = merged[path][part.removeprefix(f"{path}.")]
            else:
                given[part] = by_id[id(self.state[part])]
        return {made: value.detach() for made, value in read(self.module, given, group)}


def _all(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)
