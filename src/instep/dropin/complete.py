"""Whether a round has brought all that an engine needs: functions of metadata, of what the workers'
loaders did, and of bytes at hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod

import torch
from msgspec import structs

from instep.digest import digest
from instep.errors import PlanError
from instep.protocol import TensorMeta, WorkerPlan
from instep.receiver.ties import UNTIE

Known = Mapping[str, tuple[TensorMeta, int]]
"""Tensors of which only the digest is left."""


def lacking(plans: Iterable[WorkerPlan]) -> dict[str, int]:
    """Parameters that are not filled yet, with the largest number of elements that a worker misses.
    Layers that compute their weights on the way are left out: of them it cannot be told."""
    found: dict[str, int] = {}
    for plan in plans:
        written: Counter[str] = Counter()
        for route in plan.routes:
            written[route.param] += route.target.numel
        for param in plan.params:
            missing = prod(param.shape) - written[param.name] - param.spare
            if missing > 0 and param.layer not in plan.reload_only:
                found[param.name] = max(missing, found.get(param.name, 0))
    return found


def unread(names: Iterable[str], plans: Sequence[WorkerPlan]) -> list[str]:
    """Tensors that no worker's loader has taken anything from."""
    read = {route.tensor for plan in plans for route in plan.routes}.union(*(plan.computed for plan in plans))
    return [name for name in names if name not in read]


def places(plans: Iterable[WorkerPlan]) -> dict[str, int]:
    """Where in an engine that is read which comes of each tensor: the number of the first
    parameter, over all workers."""
    found: dict[str, int] = {}
    begin = 0
    for plan in plans:
        numbers = {param.name: begin + number for number, param in enumerate(plan.params)}
        for route in plan.routes:
            if route.tensor is not None and route.param in numbers:
                found[route.tensor] = min(numbers[route.param], found.get(route.tensor, numbers[route.param]))
        begin += len(plan.params)
    return found


def twin(name: str, metas: Mapping[str, TensorMeta], tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Another tensor of the round with the same dtype, shape and bytes."""
    mine = tensors[name]
    for other, meta in metas.items():
        if other != name and (meta.dtype, meta.shape) == (metas[name].dtype, metas[name].shape) and _equal(tensors[other], mine):
            return other
    return None


def ties(metas: Mapping[str, TensorMeta], tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Tensors that have the dtype, shape and bytes of an earlier one of the round, with that one's
    name."""
    found, before = {}, dict[str, TensorMeta]()
    for name, meta in metas.items():
        if other := twin(name, {**before, name: meta}, tensors):
            found[name] = other
        else:
            before[name] = meta
    return found


def tied(metas: Mapping[str, TensorMeta], tensors: Mapping[str, torch.Tensor], error: PlanError) -> list[TensorMeta]:
    """What came, tensors of the same bytes as ties. Raises `error` where it is not about ties, or
    where no two have the same bytes."""
    found = ties(metas, tensors) if error.next_step == UNTIE else {}
    if not found:
        raise error
    return [structs.replace(meta, alias_of=found.get(meta.name)) for meta in metas.values()]


def needed(found: dict[str, str], metas: Mapping[str, TensorMeta], fails: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Those ties without which a trace fails. Others have the same bytes by chance, as norms that
    are all ones: a trainer may send one of these alone."""
    for kind in {(metas[name].dtype, metas[name].shape) for name in found}:
        fewer = {name: other for name, other in found.items() if (metas[name].dtype, metas[name].shape) != kind}
        found = found if fails(fewer) else fewer
    return found


def of_no_use(meta: TensorMeta, tensor: torch.Tensor, earlier: Known) -> bool:
    """Whether a tensor that no worker reads can be left out.

    It has the bytes of one of the earlier tensors, or none has its dtype and shape.

    A head of its own, which an engine that ties its head would drop, has those of the embedding.
    """
    alike = [(other, had) for other, had in earlier.values() if (other.dtype, other.shape) == (meta.dtype, meta.shape)]
    return not alike or any(digest(tensor, other) == had for other, had in alike)


def listed(names: Collection[str]) -> str:
    shown = sorted(names)[:6]
    return ", ".join(shown) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
