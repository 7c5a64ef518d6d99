"""Live tensors as a source: a module, however wrapped, or a mapping of names to tensors."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from instep.errors import ConfigError, SourceError
from instep.protocol import TensorMeta, dtype_name
from instep.source import Look
from instep.source.bare import unwrap
from instep.source.live import Listed
from instep.source.names import canonical_names
from instep.source.snapshot import Snapshot, Values, read, take
from instep.source.tensors import check, checksums, identity, versions
from instep.source.within import Within, modules, prefixed

ITEMS = (dict.items, OrderedDict.items)


class MappingSource:
    """A mapping of checkpoint names to tensors, read anew at each call. Names and order are the
    mapping's own, without what `torch.compile`, activation checkpointing and FSDP put into the
    names of a state dict (`canonical`).

    A dict holds all its values at once, so two values in the same memory are tied. Another mapping
    may make each value on access, in memory that it uses again. There two values count as tied if
    their bytes agree too, and both reads of a push compare them.

    Raises `ConfigError` for names that are no strings and values that are no tensors, `SourceError`
    for tensors that cannot travel.
    """

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._mapping = mapping
        self._read: list[TensorMeta] = []
        self._given: dict[str, str] = {}  # the mapping's own names
        self._listed: Listed | None = None  # the tensors that `_read` describes
        self.metadata()

    def metadata(self) -> list[TensorMeta]:
        """Returns the same list for as long as a dict has the same tensors in the same places."""
        if not self.stays:
            return self._described()
        listed = self._listed
        if listed is None or not listed.holds(self._mapping):
            self._listed = None  # also where the new tensors are refused
            self._described()
            self._listed = Listed(self._mapping)
        return self._read

    def _described(self) -> list[TensorMeta]:
        first: dict[Hashable, str] = {}
        metas = []
        for name, tensor in self._items():
            check(name, tensor)
            original = first.setdefault(identity(tensor), name)
            if original != name and not self.stays and not self._tied(original, name):
                original = name
            metas.append(TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape), None if original == name else original))
        self._read = metas
        return metas

    @property
    def stays(self) -> bool:
        """Whether the mapping is a dict that nothing computes on access."""
        kind = type(self._mapping)
        return isinstance(self._mapping, dict) and kind.__getitem__ is dict.__getitem__ and kind.items in ITEMS

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata() if self.stays else self._read:
            if meta.alias_of is None:
                yield meta.name, self._value(meta.name).detach()

    def again(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self._read:
            if meta.alias_of is None or not self.stays:
                yield meta.name, self._value(meta.name).detach()

    def stamp(self) -> Hashable:
        """Returns a value that changes with the tensors. For a mapping that may make values on
        access it holds the names only."""
        return self.look().stamp if self.stays else tuple(self._mapping)

    def look(self) -> Look:
        metas = self.metadata()
        if not self.stays or self._listed is None:
            return Look(metas, self.stamp())
        return Look(metas, (self._listed.facts, versions(self._mapping.values())), self._listed.structure)

    @property
    def device(self) -> torch.device:
        """The device of the first value. The values are not looked at, because a push does that."""
        return next((self._mapping[name].device for name in self._given.values()), torch.device("cpu"))

    def score(self, token_ids: list[int]) -> list[float] | None:  # noqa: ARG002
        return None

    def within(self) -> Iterator[list[Within]]:
        return prefixed(self.metadata())

    def _tied(self, original: str, name: str) -> bool:
        """Whether two values lie in the same memory while both are held, and reading the second one
        leaves the bytes of the first."""
        one = self._value(original)
        (before,) = checksums([one])
        other = self._value(name)
        return identity(one) == identity(other) and checksums([other]) == [before]

    def _value(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._mapping[self._given[name]]
        return value

    def _items(self) -> Iterator[tuple[str, torch.Tensor]]:
        given = list(self._mapping)
        for name in given:
            if not isinstance(name, str):
                raise ConfigError(f"a mapping of weights has names as keys, not {name!r}")
        self._given = canonical_names(given)
        for name, (_, tensor) in zip(self._given, self._mapping.items(), strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"{name} is a {type(tensor).__name__}, not a tensor", tensor=name, next_step="push the state dict alone")
            yield name, tensor


class ModuleSource:
    """A live `torch.nn.Module`: plain, or in any nesting of DDP, `torch.compile`, activation
    checkpointing and PEFT.

    Names, dtypes and values are those that `save_pretrained` of the bare model writes, adapters
    merged; those of `state_dict` for a module that is no transformers model. Tensors are views of
    the module's memory, except merged layers (one at a time) and what the checkpoint format joins.
    Nothing of the module is ever written.

    Every method raises `SourceError`, with the tensor's name, for what cannot be read whole:
    sharded, quantised and meta tensors, placeholders, two tensors of one name.
    """

    stays = True
    whole = True  # see `Guarded.whole`

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._snapshot: Snapshot | None = None
        self._made_of: list[int] = []  # checksums at the start of `tensors`

    def metadata(self) -> list[TensorMeta]:
        """Returns the same list for as long as the structure does not change."""
        return self._current().metadata

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of the structure that `metadata` or `stamp` saw last."""
        snapshot = self._snapshot or self._current()
        values = Values(snapshot)
        self._made_of = checksums(snapshot.of_made)
        for group in snapshot.groups:
            if snapshot.is_made(group):
                parts, saved = group
                yield from read(snapshot.module, {name: values[name] for name in parts}, saved)
            else:
                yield from snapshot.views(group)

    def again(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Reads views again. Nothing is computed a second time: the tensors that merged layers are
        computed from must be unchanged."""
        snapshot = self._snapshot or self._current()
        if checksums(snapshot.of_made) != self._made_of:
            raise SourceError.changed()
        for group in snapshot.groups:
            if snapshot.is_made(group):
                yield from ((one.meta.name, None) for one in group[1])
            else:
                yield from snapshot.views(group)

    def stamp(self) -> Hashable:
        """Returns a stamp that is cheap to take. It misses changes that PyTorch does not count
        (`tensor.data`, fused optimizers, other libraries)."""
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

    def within(self) -> Iterator[list[Within]]:
        return modules(self._module, lambda module: ModuleSource(module).metadata())

    @property
    def device(self) -> torch.device:
        """The device of the first tensor in the structure that was seen last. Nothing is merged to
        find it."""
        return next((tensor.device for tensor in (self._snapshot or self._current()).state.values()), torch.device("cpu"))

    @property
    def merged(self) -> bool:
        """Tells whether the values that were read last have an adapter merged into them."""
        return (self._snapshot or self._current()).live.applies_adapters()

    def _current(self) -> Snapshot:
        """Returns the snapshot, taken anew after a change of structure. The check takes half a
        millisecond, a new snapshot some hundred."""
        root = unwrap(self._module)
        if self._snapshot is None or not self._snapshot.live.holds(root):
            self._snapshot = None  # also where the new structure is refused
            self._snapshot = take(root)
        return self._snapshot


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    # Only the flags are set: `train()` and `eval()` may be overridden to do more.
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _eager() -> AbstractContextManager[Any]:
    """Returns a context that runs the model eagerly, so that nothing is compiled for the scored
    length. It does nothing where dynamo was never imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
