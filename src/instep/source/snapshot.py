"""The structure of a live module at one moment: which checkpoint tensors it has, and what each is
made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import nn

from instep.errors import SourceError
from instep.protocol import TensorMeta
from instep.source.bare import bare, merge, owner
from instep.source.layout import Saved, convert, layout
from instep.source.live import Live
from instep.source.names import canonical, canonical_names
from instep.source.parametrized import computed
from instep.source.tensors import check, identity

Group = tuple[tuple[str, ...], list[Saved]]
"""Checkpoint tensors that are no aliases, and the live tensors that they are made of."""

TIED = (
    "leave the tied layers out of the adapter (target_modules, modules_to_save), or untie them on both sides: save the model with "
    "tie_word_embeddings=False in its config, train that, and start the engine from it"
)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a module's checkpoint is made of. Valid for as long as `live` holds."""

    live: Live
    module: nn.Module
    state: dict[str, torch.Tensor]
    adapters: dict[str, tuple[str, Any]]
    """Names in `state` whose values `merge` computes, each with its layer's path and the layer."""
    metadata: list[TensorMeta]
    groups: list[Group]

    @cached_property
    def makes(self) -> bool:
        """Whether some checkpoint tensor is neither a live tensor nor a view of one."""
        return not all(map(self._stays, self.groups))

    def _stays(self, group: Group) -> bool:
        """Whether a group's tensors are in live memory. Views of a tensor that is not contiguous
        are taken of a copy."""
        parts, saved = group
        in_order = all(one.whole for one in saved) or all(self.state[name].is_contiguous() for name in parts)
        return in_order and not self.is_made(group)

    def is_one(self, group: Group) -> bool:
        """Whether a group is one live tensor, unchanged."""
        parts, saved = group
        return len(saved) == 1 and saved[0].whole and parts[0] not in self.adapters

    def is_made(self, group: Group) -> bool:
        """Whether something is computed for a group. The tensors of other groups are views of live
        memory."""
        parts, saved = group
        return any(one.view is None for one in saved) or not self.adapters.keys().isdisjoint(parts)

    @cached_property
    def of_made(self) -> list[torch.Tensor]:
        """The live tensors from which something is computed."""
        found: dict[int, torch.Tensor] = {}
        for name in (name for group in self.groups if self.is_made(group) for name in group[0]):
            layer = self.adapters[name][1] if name in self.adapters else None
            for tensor in (self.state[name],) if layer is None else (*layer.parameters(), *layer.buffers()):
                found[id(tensor)] = tensor
        return list(found.values())

    def views(self, group: Group) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the checkpoint tensors of a group for which nothing is computed."""
        parts, saved = group
        if self.is_one(group):
            yield saved[0].meta.name, self.state[parts[0]].detach()
        else:
            yield from read(self.module, {name: self.state[name].detach() for name in parts}, saved)


def take(root: nn.Module) -> Snapshot:
    live = Live(root)
    for name, tensor in zip(live.names, live.tensors, strict=True):
        check(canonical(name), tensor)
    canonical_names(live.names)
    module, state, adapters, saved = checkpoint(root, identity)
    groups = groupby((one for one in saved if one.meta.alias_of is None), key=lambda one: one.parts)
    return Snapshot(live, module, state, adapters, [one.meta for one in saved], [(parts, list(group)) for parts, group in groups])


def checkpoint(
    root: nn.Module, identity: Callable[[torch.Tensor], Hashable]
) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, tuple[str, Any]], list[Saved]]:
    """Works out what `save_pretrained` would write of `root` without wrappers and adapters.

    Returns the bare module, its state dict, the names in it whose values `merge` computes, each
    with its layer's path and the layer, and the checkpoint tensors. identity: equal for tied
    tensors.
    """
    module, adapted = bare(root)
    state: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise SourceError(f"{name} of the state dict is a {type(value).__name__}, not a tensor", tensor=name)
    adapters: dict[str, tuple[str, Any]] = {}
    for path, layer in adapted.items():
        prefix, own = f"{path}." if path else "", computed(layer)
        for name in state:
            if name.startswith(prefix) and (not own or name.removeprefix(prefix) in own):
                adapters.setdefault(name, (path, layer))
    same = {name: id(tensor) if tensor.is_meta else identity(tensor) for name, tensor in state.items()}
    _check_ties(same, adapters)
    return module, state, adapters, layout(module, state, same)


def _check_ties(same: dict[str, Hashable], adapters: dict[str, tuple[str, Any]]) -> None:
    """Raises `SourceError` where an adapter changes one of two tied tensors and not the other.
    Merged weights cannot express that."""
    owners: dict[Hashable, tuple[str, int | None]] = {}
    for name, value in same.items():
        who = owner(adapters[name][1]) if name in adapters else None
        first, other = owners.setdefault(value, (name, who))
        if other != who:
            raise SourceError(
                f"{first} and {name} are tied, but their adapters differ: merged, both would change",
                tensor=name,
                next_step=TIED,
            )


class Values:
    """Returns current values by name, with adapters merged and parametrized weights computed. One
    such layer is held at a time."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._path: str | None = None
        self._merged: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        live = self._snapshot.state[name].detach()
        if name not in self._snapshot.adapters:
            return live
        path, layer = self._snapshot.adapters[name]
        if path != self._path:
            self._merged = {}  # before the next layer is copied, not after
            self._path, self._merged = path, merge(path, layer)
        value = self._merged[name.removeprefix(f"{path}.")]
        if (value.shape, value.dtype) != (live.shape, live.dtype):
            raise SourceError(
                f"what is computed of {name} has changed it from {live.dtype} {live.shape} to {value.dtype} {value.shape}", tensor=name
            )
        return value


def read(module: nn.Module, parts: dict[str, torch.Tensor], group: list[Saved]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the checkpoint tensors of `group`, made of the live tensors `parts`."""
    if not all(saved.whole for saved in group):
        parts = {name: part.contiguous() for name, part in parts.items()}
    converted = convert(module, parts) if any(saved.view is None for saved in group) else {}
    for saved in group:
        if saved.view is not None:
            yield saved.meta.name, saved.of(*parts.values())
        elif saved.meta.name in converted:
            yield saved.meta.name, converted[saved.meta.name]
        else:
            raise SourceError(f"{saved.meta.name} cannot be made of {', '.join(parts)} alone", tensor=saved.meta.name)
