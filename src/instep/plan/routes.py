"""Proves that a plan is complete, from what the workers' loaders did. Pure functions."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from instep.errors import PlanError
from instep.plan.dtypes import check_rounding, stored
from instep.plan.region import covered, disjoint, extent, simplify
from instep.protocol import (
    ITEM_BYTES,
    ParamMeta,
    Region,
    Route,
    TensorMeta,
    WorkerPlan,
    encode,
)

BUFFERS = "no engine was touched: push the module or its whole state dict, which has the buffers too, not the parameters alone"
UNREAD = (
    "no engine was touched: give the source the names of the checkpoint that the engine loads. Where the engine ties two layers, as "
    "tie_word_embeddings does, train the two as one, or start the engine from a checkpoint of the untied model"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one engine needs of a source, proved complete for all of its workers.

    `casts` maps a tensor to the dtype in which it is sent, where that is not the source's.
    """

    signature: str
    workers: tuple[WorkerPlan, ...]
    casts: dict[str, str]
    widened: dict[str, str]
    """Tensors stored in a wider dtype than the source's, which changes no value, and that dtype."""
    rounded: dict[str, str]
    """Tensors stored in a dtype that does not have all of the source's values, and that dtype: with
    `cast=True` alone."""
    reads: tuple[dict[str, list[Region]], ...]
    """The regions that each worker reads (see `reads`)."""
    wholes: frozenset[str]
    """Tensors that workers read in regions which overlap or leave gaps: each worker sums up all."""

    def kept(self) -> dict[str, str]:
        """Returns the engine parameters that the push leaves alone, and why."""
        return {param.name: param.kept for worker in self.workers for param in worker.params if param.kept}


def signature(tensors: Sequence[TensorMeta]) -> str:
    """Returns a hash that is equal for equal lists of names, dtypes, shapes and aliases. A plan
    holds until it changes."""
    return hashlib.blake2b(encode(tensors), digest_size=16).hexdigest()


def check_metadata(tensors: Sequence[TensorMeta]) -> None:
    """Raises `PlanError` for an empty list, a name that occurs twice, an unknown dtype, and an
    alias of nothing or of a tensor with another dtype or shape."""
    if not tensors:
        raise PlanError("the source has no tensors")
    by_name: dict[str, TensorMeta] = {}
    for meta in tensors:
        if meta.name in by_name:
            raise PlanError(f"the source names {meta.name!r} twice", tensor=meta.name)
        if meta.dtype not in ITEM_BYTES:
            raise PlanError(f"{meta.name}: dtype {meta.dtype} cannot be sent; known: {', '.join(ITEM_BYTES)}", tensor=meta.name)
        by_name[meta.name] = meta
    for meta in tensors:
        target = by_name.get(meta.alias_of) if meta.alias_of else None
        if meta.alias_of and (target is None or target.alias_of or (target.dtype, target.shape) != (meta.dtype, meta.shape)):
            raise PlanError(
                f"{meta.name} is an alias of {meta.alias_of!r}, which is not a tensor of the same dtype and shape", tensor=meta.name
            )


def prove(engine: str, tensors: Sequence[TensorMeta], workers: Sequence[WorkerPlan], *, cast: bool, whole: bool = False) -> Plan:
    """Returns the plan of an engine. Raises `PlanError` that names the engine, the parameter or
    tensor, and what is wrong with it.

    cast: whether tensors may be rounded. A wider dtype, which has every value of the source's, is
    always allowed.
    whole: whether the tensors are all that a checkpoint of the trainer's model has. If so, a buffer
    of the engine that is not among them belongs to the engine.
    """
    for rank, worker in enumerate(workers):
        _prove_written(f"{engine} rank {rank}", worker, whole=whole)
    by_name = {meta.name: meta for meta in tensors}
    _prove_read(engine, by_name, workers)
    dtypes = stored(by_name, workers)
    if not cast:
        check_rounding(engine, by_name, dtypes.rounded)
    read = tuple(reads(worker.routes, by_name) for worker in workers)
    return Plan(signature(tensors), tuple(workers), *dtypes, read, _wholes(by_name, read))


def _prove_written(where: str, worker: WorkerPlan, *, whole: bool) -> None:
    """Checks that each parameter is written exactly once, or kept with a reason."""
    routes = defaultdict(list)
    for route in worker.routes:
        routes[route.param].append(route)
    for param in worker.params:
        if param.name in worker.opaque or (whole and param.buffer and not routes[param.name]):
            continue
        targets = [route.target for route in routes[param.name]]
        if not disjoint(targets, param.shape):
            raise PlanError(f"{where}: parts of {param.name} are written twice, by {_names(routes[param.name])}", tensor=param.name)
        missing = Region(0, param.shape, ()).numel - sum(target.numel for target in targets)
        if missing > param.spare:
            text = _unwritten(where, param, missing, routes[param.name])
            raise PlanError(text, tensor=param.name, next_step=BUFFERS if param.buffer else None)


def _unwritten(where: str, param: ParamMeta, missing: int, routes: Sequence[Route]) -> str:
    if not routes:
        kind = "the buffer " if param.buffer else ""
        return f"{where}: nothing in the source fills {kind}{param.name} {list(param.shape)}"
    gap = next(low for low, _ in _gaps([extent(route.target) for route in routes], Region(0, param.shape, ()).numel))
    row = gap // max(1, Region(0, param.shape[1:], ()).numel)
    return (
        f"{where}: {param.name} {list(param.shape)} is filled in part only, by {_names(routes)}: "
        f"{missing} elements have no source, the first in row {row}. Engines fuse layers: send all the parts, such as q, k and v, together"
    )


def _gaps(spans: Sequence[tuple[int, int]], end: int) -> Iterable[tuple[int, int]]:
    position = 0
    for low, high in sorted(spans):
        if low > position:
            yield position, low
        position = max(position, high)
    yield position, end


def _names(routes: Sequence[Route]) -> str:
    names = list(dict.fromkeys(route.tensor or "padding" for route in routes))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _prove_read(engine: str, tensors: dict[str, TensorMeta], workers: Sequence[WorkerPlan]) -> None:
    """Checks that the engine's workers together read each tensor completely. Aliases need no
    reader: an engine with tied weights has one copy."""
    reads: dict[str, list[Region]] = defaultdict(list)
    for worker in workers:
        for route in worker.routes:
            if route.tensor is not None and route.source is not None:
                reads[route.tensor].append(route.source)
        for name, regions in worker.computed.items():
            reads[name] += regions
    for name, meta in tensors.items():
        if meta.alias_of:
            continue
        if name not in reads:
            kept = next((param.kept for worker in workers for param in worker.params if param.name == name and param.kept), None)
            why = f": there it is {kept}" if kept else ""
            raise PlanError(f"{engine}: the engine's loader has no place for {name}{why}", tensor=name, next_step=UNREAD)
        if (got := covered(reads[name], meta.shape)) < meta.numel:
            raise PlanError(
                f"{engine}: only {got} of the {meta.numel} elements of {name} {list(meta.shape)} are read: its shape is not the engine's",
                tensor=name,
            )


def reads(routes: Iterable[Route], tensors: Mapping[str, TensorMeta]) -> dict[str, list[Region]]:
    """Returns the distinct regions that are read of each tensor, in an order that depends on the
    regions alone. A region of an alias counts for the tensor that it stands for."""
    found: dict[str, set[Region]] = defaultdict(set)
    for route in routes:
        if route.tensor is not None and route.source is not None:
            found[tensors[route.tensor].alias_of or route.tensor].add(simplify(route.source))
    return {name: sorted(regions, key=lambda one: (one.offset, one.shape, one.stride)) for name, regions in found.items()}


def apart(regions: Collection[Region], shape: Sequence[int]) -> bool:
    """Whether no element of a tensor of `shape` is read twice."""
    return covered(regions, shape) == sum(region.numel for region in regions)


def _wholes(tensors: Mapping[str, TensorMeta], reads: Sequence[Mapping[str, Sequence[Region]]]) -> frozenset[str]:
    found: dict[str, set[Region]] = defaultdict(set)
    for name, regions in chain.from_iterable(one.items() for one in reads):
        found[name].update(regions)
    return frozenset(name for name, regions in found.items() if not make_up(regions, tensors[name].shape))


def make_up(regions: Collection[Region], shape: Sequence[int]) -> bool:
    """Whether regions have each element of a tensor of `shape` exactly once."""
    return covered(regions, shape) == sum(region.numel for region in regions) == Region(0, tuple(shape), ()).numel
