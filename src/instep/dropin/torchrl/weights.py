"""Weights in TorchRL's forms as a source, and the metadata that both sides are told before the
first update."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from instep.errors import PlanError
from instep.protocol import TensorMeta, dtype_name
from instep.source import Source, open_source
from instep.source.current import CurrentSource

Metadata = Mapping[str, tuple[torch.dtype, Sequence[int]]]
JOIN = "join"
"""The trainer's first request: what it was told of the model, and how long it waits for an
answer."""
Joining = tuple[list[TensorMeta], float]


def get_model_metadata(model: Any) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Name, dtype and shape of every tensor that an update sends, tied names included.

    model: what `update_weights` takes: a module, a TensorDict or a mapping of names to tensors.
    """
    return {meta.name: (getattr(torch, meta.dtype), torch.Size(meta.shape)) for meta in open_weights(model).metadata()}


def described(metadata: Metadata) -> dict[str, TensorMeta]:
    return {name: TensorMeta(name, dtype_name(dtype), tuple(shape)) for name, (dtype, shape) in metadata.items()}


def differences(here: Mapping[str, TensorMeta], there: Mapping[str, TensorMeta], sides: tuple[str, str]) -> str | None:
    """The first tensors that are not the same on both sides, in words; None where all are."""

    def text(meta: TensorMeta | None) -> str:
        return f"{meta.dtype} {list(meta.shape)}" if meta else "missing"

    found = [
        f"{name} is {text(here.get(name))} {sides[0]}, {text(there.get(name))} {sides[1]}"
        for name in {**here, **there}
        if text(here.get(name)) != text(there.get(name))
    ]
    return "; ".join(found[:3]) + f" and {len(found) - 3} more" * (len(found) > 3) if found else None


def check_told(theirs: Iterable[TensorMeta], announced: Mapping[str, TensorMeta], here: str) -> None:
    """Raises `PlanError` where a trainer was told of other tensors than `announced`. here: where
    these were."""
    if different := differences({meta.name: meta for meta in theirs}, announced, ("at the trainer", here)):
        raise PlanError(f"trainer and receiver were told of different models: {different}")


def open_weights(weights: Any, names: Collection[str] | None = None) -> Source:
    """Weights in any of TorchRL's forms as a source: a module, a TensorDict, a mapping, or pairs of
    a name and a tensor.

    names: of a TensorDict or a mapping, these tensors alone: `TensorDict.from_module` takes along
    buffers that no checkpoint has.
    """
    while isinstance(weights, nn.Module) and type(weights).__module__.startswith("torchrl.") and hasattr(weights, "model"):
        weights = weights.model  # TorchRL's policies put a prefix before every name of the model that they hold
    if hasattr(weights, "flatten_keys"):
        weights = dict(weights.flatten_keys(".").items())
    elif isinstance(weights, Iterable) and not isinstance(weights, nn.Module | Mapping | str):
        weights = dict(weights)
    if isinstance(weights, Mapping) and names is not None:
        weights = {name: weights[name] for name in weights if name in names}
    return open_source(weights)


class AnnouncedSource(CurrentSource):
    """Raises `PlanError` for weights that are not those that were announced; a tied name may be
    announced or not."""

    announced: Mapping[str, TensorMeta] = {}

    def metadata(self) -> list[TensorMeta]:
        metas = super().metadata()
        expected = {meta.name: meta for meta in metas if meta.alias_of is None or meta.name in self.announced}
        if found := differences(expected, self.announced, ("now", "as announced")):
            raise PlanError(
                f"these weights were not announced: {found}",
                next_step="no engine was touched: call init_all_workers_group with get_model_metadata of what is sent",
            )
        return metas
