"""The dtype in which an engine stores each tensor, where it differs from the source's."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from instep.errors import PlanError
from instep.protocol import ITEM_BYTES, TensorMeta, WorkerPlan


class Numbers(NamedTuple):
    """The values of a dtype: its significant bits, its smallest step, and its smallest and largest
    value."""

    bits: int
    step: float
    smallest: float
    largest: float


class Dtypes(NamedTuple):
    """Tensors that an engine stores in another dtype than the source's.

    sent: the dtype in which to send each tensor that all workers store in one other dtype. A tensor
    that an engine stores in several dtypes is sent as the source has it, and each copy converts it.
    widened: the dtype of each tensor stored in one that has every value of the source's. rounded:
    the dtype of each tensor stored in one that has not.
    """

    sent: dict[str, str]
    widened: dict[str, str]
    rounded: dict[str, str]


def widens(old: str, new: str) -> bool:
    """Whether every value of dtype `old` is a value of dtype `new`, so that a conversion rounds
    nothing."""
    if old == new:
        return True
    has, needs = _numbers(new), _numbers(old)
    if new == "bool" or (not getattr(torch, new).is_floating_point and getattr(torch, old).is_floating_point):
        return False
    return needs.bits <= has.bits and has.step <= needs.step and has.smallest <= needs.smallest and needs.largest <= has.largest


@functools.cache
def _numbers(dtype: str) -> Numbers:
    if dtype == "bool":
        return Numbers(1, 1, 0, 1)
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        of = torch.finfo(kind)
        return Numbers(1 - round(math.log2(of.eps)), of.smallest_normal * of.eps, of.min, of.max)
    whole = torch.iinfo(kind)
    return Numbers(whole.max.bit_length(), 1, whole.min, whole.max)


def stored(tensors: Mapping[str, TensorMeta], workers: Sequence[WorkerPlan]) -> Dtypes:
    """Returns the dtypes in which an engine's workers store the tensors. An alias counts as the
    tensor that it stands for."""
    found: dict[str, set[str]] = defaultdict(set)
    for worker in workers:
        dtypes = {param.name: param.dtype for param in worker.params}
        for route in worker.routes:
            if route.tensor is not None:
                found[tensors[route.tensor].alias_of or route.tensor].add(dtypes[route.param])
        for name in worker.computed:
            original = tensors[name].alias_of or name
            found[original].add(tensors[original].dtype)
    result = Dtypes({}, {}, {})
    for name, dtypes_of in found.items():
        source = tensors[name].dtype
        narrow = sorted((dtype for dtype in dtypes_of if not widens(source, dtype)), key=ITEM_BYTES.__getitem__)
        wide = sorted(dtypes_of - {source} - {*narrow}, key=ITEM_BYTES.__getitem__)
        if len(dtypes_of) == 1 and source not in dtypes_of:
            result.sent[name] = next(iter(dtypes_of))
        if narrow:
            result.rounded[name] = narrow[0]
        elif wide:
            result.widened[name] = wide[-1]
    return result


def common(engines: Sequence[Mapping[str, str]], tensors: Sequence[TensorMeta]) -> Mapping[str, str]:
    """Returns the dtypes in which to send tensors to all of `engines`. engines: `Dtypes.sent` of
    each.

    Raises `PlanError` where engines need different dtypes, because all are sent the same bytes.
    """
    if all(one == engines[0] for one in engines):
        return engines[0] if engines else {}
    for meta in tensors:
        dtypes = list(dict.fromkeys(one.get(meta.name, meta.dtype) for one in engines))
        if len(dtypes) > 1 and not meta.alias_of:
            text = f"engines store {meta.name} in different dtypes, {dtypes[0]} and {dtypes[1]}"
            raise PlanError(
                text, tensor=meta.name, next_step="no engine was touched: give the engines of each dtype a WeightSync of their own"
            )
    return engines[0]


def check_rounding(engine: str, tensors: Mapping[str, TensorMeta], rounded: Mapping[str, str]) -> None:
    """Raises `PlanError` where an engine would round tensors."""
    if not rounded:
        return
    name, dtype = next(iter(rounded.items()))
    raise PlanError(
        f"{engine}: {len(rounded)} tensors would be rounded, the first is {name}: "
        f"{tensors[name].dtype} in the source, {dtype} in the engine",
        tensor=name,
        next_step="pass cast=True to round them on the way out, or give the trainer and the engine one dtype",
    )
