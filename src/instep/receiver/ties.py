"""Parameters of an engine that share memory under two names: a version must bring the same for
both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import nn

from instep.errors import PlanError
from instep.plan.region import disjoint
from instep.plan.region import extent as extent_of
from instep.protocol import Region, Route, TensorMeta, WorkerPlan
from instep.receiver.memory import Extent, extent

Copied = tuple[str | None, Region | None, Region]
UNTIE = (
    "train the two as one, as the engine computes with them, and give the source one name for both (a module that ties them does); "
    "or start the engine from a checkpoint of the untied model, with tie_word_embeddings false in its config.json"
)


def owners(model: nn.Module) -> dict[str, str]:
    """Returns, for each parameter name, the first name of the same memory. It is another name where
    two layers are tied."""
    first: dict[Hashable, str] = {}
    return {name: first.setdefault(_identity(tensor), name) for name, tensor in _live(model)}


def check_ties(model: nn.Module, plan: WorkerPlan, tensors: Sequence[TensorMeta]) -> None:
    """Raises `PlanError` where two tensors go to the same memory and the source does not declare
    them to be the same."""
    originals = {meta.name: meta.alias_of or meta.name for meta in tensors}
    copied: dict[str, set[Copied]] = defaultdict(set)
    for route in plan.routes:
        copied[route.param].add(_copied(route, originals))
    live = {name: tensor for name, tensor in _live(model) if name in copied or name in plan.opaque}
    for first, second, same in _shared(live):
        if not same or {first, second} & {*plan.opaque} or copied[first] != copied[second]:
            one, other = (_names(copied[param]) for param in (first, second))
            how = "are one tensor" if same else "share memory"
            text = f"{first} and {second} {how} in the engine, and the source gives {one} for the one and {other} for the other"
            raise PlanError(text, tensor=second, next_step=UNTIE)


def _copied(route: Route, originals: dict[str, str]) -> Copied:
    return (originals[route.tensor] if route.tensor else None), route.source, route.target


def _names(copied: set[Copied]) -> str:
    return ", ".join(sorted({name for name, _, _ in copied if name})) or "values that the loader computes"


def _live(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _lies(tensor: torch.Tensor) -> Extent | None:
    return extent(tensor) if not tensor.is_meta and tensor.layout is torch.strided else None


def _identity(tensor: torch.Tensor) -> Hashable:
    """Returns a key that is equal for the same elements of the same memory. A tensor without memory
    has a key of its own."""
    found = _lies(tensor)
    return id(tensor) if found is None else (found, tensor.shape, tensor.stride(), tensor.dtype)


def _shared(live: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, bool]]:
    """Yields pairs of names whose memory has elements in common, and whether it is the same
    memory."""
    first: dict[Hashable, str] = {}
    for name, tensor in live.items():
        if (other := first.setdefault(_identity(tensor), name)) != name:
            yield other, name, True
    found = [(where, name) for name in first.values() if (where := _lies(live[name])) is not None]
    open_ones: list[tuple[Extent, str]] = []
    for where, name in sorted(found, key=lambda one: (str(one[0][0]), *one[0][1:])):
        open_ones = [one for one in open_ones if one[0][0] == where[0] and one[0][2] > where[1]]
        yield from ((other, name, False) for before, other in open_ones if _meet(live[other], live[name], before[1]))
        open_ones.append((where, name))


def _meet(one: torch.Tensor, other: torch.Tensor, start: int) -> bool:
    """Whether two tensors have elements in common. start: the lower address. Interleaved columns of
    one matrix have none."""
    size, ahead = one.element_size(), other.data_ptr() - start
    if size != other.element_size() or ahead % size:
        return True
    regions = [Region(at, tuple(tensor.shape), tensor.stride()) for at, tensor in ((0, one), (ahead // size, other))]
    return not disjoint(regions, (max(extent_of(region)[1] for region in regions),))
