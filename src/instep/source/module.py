"""Live tensors as a source: a module, however wrapped, or a mapping of names to tensors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from instep.errors import ConfigError, SourceError
from instep.protocol import TensorMeta, dtype_name
from instep.source import Look
from instep.source.bare import bare, merge, owner, unwrap
from instep.source.layout import Saved, convert, layout
from instep.source.live import Live
from instep.source.names import canonical, canonical_names
from instep.source.tensors import check, identity, versions


class MappingSource:
    """A mapping of checkpoint names to tensors, read anew at each call. Names and order are the mapping's own.

    Raises `ConfigError` for names that are no strings and values that are no tensors, `SourceError` for tensors that cannot travel.
    """

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._mapping = mapping
        self.metadata()

    def metadata(self) -> list[TensorMeta]:
        first: dict[Hashable, str] = {}
        metas = []
        for name, tensor in self._items():
            check(name, tensor)
            original = first.setdefault(identity(tensor), name)
            metas.append(TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape), None if original == name else original))
        return metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata():
            if meta.alias_of is None:
                yield meta.name, self._mapping[meta.name].detach()

    def stamp(self) -> Hashable:
        tensors = dict(self._items())
        return tuple(tensors), tuple(map(identity, tensors.values())), versions(tensors.values())

    def score(self, token_ids: list[int]) -> list[float] | None:  # noqa: ARG002
        return None

    def _items(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._mapping.items():
            if not isinstance(name, str):
                raise ConfigError(f"a mapping of weights has names as keys, not {name!r}")
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"{name} is a {type(tensor).__name__}, not a tensor", tensor=name, next_step="push the state dict alone")
            yield name, tensor


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A module's structure at one moment: valid as long as `live` stays as it is."""

    live: Live
    module: nn.Module
    state: dict[str, torch.Tensor]
    adapters: dict[str, tuple[str, Any]]
    """Names in `state` that an adapter changes, each with its layer's path and the layer."""
    metadata: list[TensorMeta]
    groups: list[tuple[tuple[str, ...], list[Saved]]]
    """Checkpoint tensors that are no aliases, by the live tensors that they are made of."""
    makes: bool = False
    """Whether some of them are not in the module's memory as they are saved."""

    def is_one(self, parts: tuple[str, ...], group: list[Saved]) -> bool:
        """Whether a group is one live tensor as it is."""
        return len(group) == 1 and group[0].whole and parts[0] not in self.adapters


class ModuleSource:
    """A live `torch.nn.Module`: plain, or in any nesting of DDP, `torch.compile`, activation checkpointing and PEFT.

    Names, dtypes and values are those that `save_pretrained` of the bare model writes, adapters merged; those of `state_dict` for
    a module that is no transformers model. Tensors are views of the module's memory, except merged layers (one at a time)
    and what the checkpoint format joins. Nothing of the module is ever written.

    Every method raises `SourceError`, with the tensor's name, for what cannot be read whole: sharded, quantised and meta
    tensors, placeholders, two tensors of one name.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._snapshot: _Snapshot | None = None

    def metadata(self) -> list[TensorMeta]:
        """The same list for as long as the structure does not change."""
        return self._current().metadata

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the structure that `metadata` or `stamp` saw last."""
        snapshot = self._snapshot or self._current()
        values = _Values(snapshot)
        for parts, group in snapshot.groups:
            if snapshot.is_one(parts, group):
                yield group[0].meta.name, snapshot.state[parts[0]].detach()
            else:
                yield from read(snapshot.module, {name: values[name] for name in parts}, group)

    def stamp(self) -> Hashable:
        """Does not see changes made through `tensor.data`, which PyTorch does not count."""
        return self.look().stamp

    def look(self) -> Look:
        snapshot = self._current()
        structure = snapshot.live.structure
        return Look(snapshot.metadata, (structure, versions(snapshot.live.tensors)), None if snapshot.makes else structure)

    def score(self, token_ids: list[int]) -> list[float] | None:
        module = unwrap(self._module)
        if "input_ids" not in inspect.signature(module.forward).parameters:
            return None
        tokens = torch.tensor([token_ids], device=next(module.parameters()).device)
        with _evaluating(module), torch.no_grad(), _eager():
            logits = getattr(module(input_ids=tokens), "logits", None)
        if logits is None or logits.shape[:-1] != tokens.shape:
            return None
        logprobs = logits[0, :-1].float().log_softmax(-1)
        scores: list[float] = logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()
        return scores

    @property
    def device(self) -> torch.device:
        """Of its first tensor, which need not be merged to know that, in the structure that was seen last."""
        return next((tensor.device for tensor in (self._snapshot or self._current()).state.values()), torch.device("cpu"))

    @property
    def merged(self) -> bool:
        """Tell whether the values of this moment have an adapter merged into them."""
        return self._current().live.applies_adapters()

    def _current(self) -> _Snapshot:
        """The snapshot, taken anew after a change of structure. To look takes half a millisecond, a new one some hundred."""
        root = unwrap(self._module)
        if self._snapshot is None or not self._snapshot.live.holds(root):
            self._snapshot = None  # also where the new structure is refused
            self._snapshot = _take(root)
        return self._snapshot


def _take(root: nn.Module) -> _Snapshot:
    live = Live(root)
    for name, tensor in zip(live.names, live.tensors, strict=True):
        check(canonical(name), tensor)
    canonical_names(live.names)
    module, state, adapters, saved = checkpoint(root, identity)
    groups = groupby((one for one in saved if one.meta.alias_of is None), key=lambda one: one.parts)
    snapshot = _Snapshot(live, module, state, adapters, [one.meta for one in saved], [(parts, list(group)) for parts, group in groups])
    return replace(snapshot, makes=not all(snapshot.is_one(*group) for group in snapshot.groups))


def checkpoint(
    root: nn.Module, identity: Callable[[torch.Tensor], Hashable]
) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, tuple[str, Any]], list[Saved]]:
    """What `save_pretrained` would write of `root` without wrappers and adapters.

    Returns the bare module, its state dict, the names in it that an adapter changes, each with its layer's path and the layer, and the
    checkpoint tensors. identity: equal for tied tensors.
    """
    module, adapted = bare(root)
    state: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise SourceError(f"{name} of the state dict is a {type(value).__name__}, not a tensor", tensor=name)
    adapters: dict[str, tuple[str, Any]] = {}
    for path, layer in adapted.items():
        for name in state:
            if name.startswith(f"{path}."):
                adapters.setdefault(name, (path, layer))
    same = {name: identity(tensor) for name, tensor in state.items()}
    _check_ties(same, adapters)
    return module, state, adapters, layout(module, state, same)


def _check_ties(same: dict[str, Hashable], adapters: dict[str, tuple[str, Any]]) -> None:
    """Raises `SourceError` where an adapter changes one of two tied tensors and not the other: merged weights cannot say what the
    trainer computes."""
    owners: dict[Hashable, tuple[str, int | None]] = {}
    for name, value in same.items():
        who = owner(adapters[name][1]) if name in adapters else None
        first, other = owners.setdefault(value, (name, who))
        if other != who:
            raise SourceError(
                f"{first} and {name} are tied, but their adapters differ: merged, both would change",
                tensor=name,
                next_step="train the tied weight with modules_to_save, or load the model with tie_word_embeddings=False",
            )


class _Values:
    """Current values by name, adapters merged. Holds one merged layer at a time."""

    def __init__(self, snapshot: _Snapshot) -> None:
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
            raise SourceError(f"the merge of {name} changed it from {live.dtype} {live.shape} to {value.dtype} {value.shape}", tensor=name)
        return value


def read(module: nn.Module, parts: dict[str, torch.Tensor], group: list[Saved]) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint tensors of `group`, made of the live tensors `parts`."""
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


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    # The flags alone: `train()` and `eval()` may be overridden to do more.
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _eager() -> AbstractContextManager[Any]:
    """Without compiling for the scored length. Nothing is compiled where dynamo was never imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
