"""Sources: what a trainer exposes to a push.

    source = open_source(model)                 # a live nn.Module, however wrapped
    source = open_source(model.state_dict())    # any mapping of checkpoint names to tensors
    source = open_source("path/to/checkpoint")  # a directory of safetensors files

A source names its tensors as `save_pretrained` would write them and hands out views of the
trainer's memory where it can: the transport makes the only copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from instep.errors import ConfigError, SourceError
from instep.protocol import TensorMeta


class Look(NamedTuple):
    """A source at one moment: its `metadata` and its `stamp`.

    place: equal to that of an earlier moment only if every tensor that `tensors` gives lies where
    it lay then. None if that is not known, or if the source makes tensors.
    """

    metadata: list[TensorMeta]
    stamp: Hashable
    place: Hashable = None


@runtime_checkable
class Source(Protocol):
    """What a push needs to know of a trainer.

    A push calls `tensors` twice, and fails if the second call gives other bytes than the first. So
    all values are those of one moment, whatever writes to them.

    A source may have more, which is looked at where the same class has `tensors`:
    `look() -> Look`, where that takes less than asking one by one.
    `stays: bool`, whether no value is written to by the source itself while others are asked for.
    Where that is not said, each value is copied before the next one is asked for. `again() ->
    Iterator[tuple[str, torch.Tensor | None]]`, called instead of `tensors` the second time. None
    stands for a value of which the source knows by itself that it is what it was; where it knows
    the opposite it raises `SourceError`. It may also give aliases, which must be what they stand
    for. `within() -> Iterator[list[Within]]`, what else of it could be pushed: where an engine does
    not take the whole, the error says how.
    """

    def metadata(self) -> list[TensorMeta]:
        """Returns names, dtypes and shapes of all tensors, aliases included. `tensors` keeps their
        order."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every tensor that is not an alias, with its current values. Each call reads the
        values anew."""

    def stamp(self) -> Hashable:
        """Returns a value that changes whenever the tensors' values may have changed. It is
        compared before and after a copy."""

    def score(self, token_ids: list[int]) -> list[float] | None:
        """Returns log-probabilities (natural log, float32) that the trainer's own forward gives to
        `token_ids[1:]`, each given the tokens before it. None for a source without a forward."""


def open_source(obj: Any) -> Source:
    """Makes a source of a module, a mapping of names to tensors, or a directory. Returns a source
    as it is.

    Raises `ConfigError` for anything else, and for a directory that holds no safetensors file.
    """
    if isinstance(obj, Source):
        return obj
    if isinstance(obj, torch.nn.Module):
        from instep.source.module import ModuleSource

        return ModuleSource(obj)
    if isinstance(obj, Mapping):
        from instep.source.module import MappingSource

        return MappingSource(obj)
    if isinstance(obj, str | Path):
        from instep.source.checkpoint import CheckpointSource

        return CheckpointSource(Path(obj))
    raise ConfigError(
        f"cannot read weights from {type(obj).__name__}: give a torch.nn.Module, a dict of tensors, a checkpoint directory or a Source"
    )


def device_of(source: Source) -> torch.device:
    """Returns the device of a source's tensors: the source's own `device` if it has one, or else
    that of its first tensor."""
    device = getattr(source, "device", None)
    return device if isinstance(device, torch.device) else next((value.device for _, value in source.tensors()), torch.device("cpu"))


def own(source: object, name: str) -> Any:
    """Returns a source's attribute if it comes from the class that defines `tensors`. None for an
    attribute inherited from another class, because it may not fit that `tensors`."""
    if "tensors" in getattr(source, "__dict__", {}):
        return None
    writer = next((kind for kind in type(source).__mro__ if "tensors" in vars(kind)), object)
    return getattr(source, name) if name in vars(writer) else None


def again(source: Source) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Reads a source a second time, after a whole first read."""
    read = own(source, "again") or source.tensors
    found: Iterator[tuple[str, torch.Tensor | None]] = read()
    return found


class Stamped(Protocol):
    def stamp(self) -> Hashable: ...


@contextmanager
def unchanged(source: Stamped) -> Iterator[Hashable]:
    """Yields the source's stamp, and checks at the end of the block that it has not changed. Raises
    `SourceError` where the trainer changed a tensor meanwhile."""
    before = source.stamp()
    yield before
    check_unchanged(source, before)


def check_unchanged(source: Stamped, before: Hashable) -> None:
    """Raises `SourceError` where the source's stamp is not `before` any more."""
    if source.stamp() != before:
        raise SourceError.changed()
