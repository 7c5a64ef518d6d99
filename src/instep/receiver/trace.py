"""Routes by watching the engine's own loader work on tensors that have shapes but no bytes.

Every `copy_` from a checkpoint tensor into a parameter is written down as (region of the tensor) ->
(region of the parameter). No knowledge of a model family is needed: fused layers, tensor-parallel
slices, padding and experts are whatever the loader does. What cannot be written as copies
(arithmetic on the way, in-place updates) marks its layer as `reload_only`, and what it was computed
from is noted.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import nn

from instep.errors import InstepError, PlanError
from instep.protocol import ParamMeta, Region, TensorMeta, WorkerPlan, dtype_name
from instep.receiver import Host
from instep.receiver.copies import live_tensors
from instep.receiver.layout import Layout
from instep.receiver.ties import check_ties, owners
from instep.receiver.watcher import Origin, ReadOnly, Watcher, layer_of, storage_of

NO_PLACE = "the engine's loader has no place for it"
WITHOUT_BYTES = re.compile(r"\bmeta (device|tensor)|unallocated storage", re.IGNORECASE)
ANEW = "start the engine from each checkpoint anew"
VALUES = (
    "no engine was touched, and names and shapes are not at fault: what goes where depends on values in this loader, and a trace "
    f"has shapes alone. Have the loader take plain copies, or {ANEW}"
)
FAILED = (
    "no engine was touched: compare the source's names and shapes with those of the checkpoint that the engine loads. If they "
    f"are the same, the loader fails on tensors without bytes: mend it, or {ANEW}"
)
UNNOTICED = (
    "no engine was touched, and no other source helps: neither plain copies nor the engine's reload session bring this "
    f"parameter. Have the loader call the parameter's `weight_loader`, or {ANEW}"
)


def trace(host: Host, tensors: Sequence[TensorMeta]) -> WorkerPlan:
    """Works out what the worker's loader would do with `tensors`. Nothing live is written.

    Raises `PlanError`, naming the tensor, where the loader refuses it or would write memory that is
    in use, where two tensors would go to the same memory, and where neither copies nor a reload
    session can fill a parameter.
    """
    real = [meta for meta in tensors if not meta.alias_of]
    live_owner = owners(host.model)
    plan = _watch(host, real, live_owner)
    # Aliases are offered only if parameters miss: a loader with a tied head may not know the name.
    if len(real) < len(tensors) and any(_unwritten(plan)):
        with suppress(PlanError):  # the loader does not know aliases: it misses another tensor
            plan = _watch(host, tensors, live_owner)
    check_ties(host.model, plan, tensors)
    return plan


def _unwritten(plan: WorkerPlan) -> Iterator[str]:
    written = {route.param for route in plan.routes} | {*plan.opaque}
    params = (param for param in plan.params if not param.buffer)
    return (param.name for param in params if param.name not in written and param.spare < math.prod(param.shape))


def _watch(host: Host, tensors: Sequence[TensorMeta], live_owner: dict[str, str]) -> WorkerPlan:
    offered = [(meta.name, torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")) for meta in tensors]
    current: list[str] = []

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in offered:
            current[:] = [name]
            yield name, tensor

    def loading() -> str:
        return current[0] if current else "the first tensor"

    live = {storage_of(tensor): name for name, tensor in live_tensors(host.model) if not tensor.is_meta}
    with _put_back(host.model), host.checkpoint_layout() as layout:
        watcher = Watcher(host.model, dict(offered), live, loading, layout)
        try:
            with torch.no_grad(), watcher, ReadOnly():
                host.load(feed())
        except InstepError:
            raise
        except Exception as error:
            shape = next((list(meta.shape) for meta in tensors if meta.name == loading()), "")
            text = f"the engine's loader refuses {loading()} {shape}: {type(error).__name__}: {error}"
            raise PlanError(text, tensor=loading(), next_step=_advice(error)) from error
        if watcher.refused is not None:  # even if the loader caught the error
            raise watcher.refused
        watcher.settle()
        return _plan(watcher, host, layout, live, live_owner)


def _advice(error: Exception) -> str | None:
    """Returns advice against an error of a loader; None where `PlanError`'s own advice on names and
    shapes is right."""
    if isinstance(error, NotImplementedError) or WITHOUT_BYTES.search(str(error)):
        return VALUES
    return None if isinstance(error, KeyError | ValueError | AssertionError | RuntimeError | IndexError) else FAILED


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Restores the modules' attributes and their tensors' memory after its block: a loader may
    replace them by tensors without bytes."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    memory = [(tensor, tensor.detach()) for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    try:
        yield
    finally:
        for module, before in attributes:
            now = vars(module)
            for name in now.keys() - before.keys():
                del now[name]
            now.update({name: value for name, value in before.items() if now.get(name) is not value})
        for tensor, alias in memory:
            if tensor.is_meta or storage_of(tensor) != storage_of(alias):
                tensor.data = alias


def _plan(watcher: Watcher, host: Host, layout: Layout, live: Mapping[int, str], live_owner: dict[str, str]) -> WorkerPlan:
    written = {route.param for route in watcher.routes} | watcher.opaque.keys()
    params = []
    for name, tensor in watcher.params.items():
        spare, why = host.spare(name)
        if name not in written and live_owner.get(name, name) != name:
            spare, why = tensor.numel(), f"the same tensor as {live_owner[name]}"
        params.append(ParamMeta(name, layer_of(name), dtype_name(tensor.dtype), tuple(tensor.shape), spare, why))
    places: dict[tuple[type, str], bool] = {}  # one buffer per class and name is tried
    for name, buffer in watcher.buffers.items():
        module, leaf = host.model.get_submodule(layer_of(name)), name.rpartition(".")[2]
        if name not in written and leaf in module._non_persistent_buffers_set:
            continue
        spare, why = (0, None) if name in written else host.spare(name)
        if name not in written and not spare:
            if (type(module), leaf) not in places:
                places[type(module), leaf] = _has_place(host, live, name, buffer)
            spare, why = (0, None) if places[type(module), leaf] else (buffer.numel(), NO_PLACE)
        params.append(ParamMeta(name, layer_of(name), dtype_name(buffer.dtype), tuple(buffer.shape), spare, why, buffer=True))
    reload_only = {layer_of(name): reason for name, reason in watcher.opaque.items()}
    computed, feeds = _read_by(watcher.made_from)
    unnoticed = sorted(layout.unnoticed())
    for param in params:
        if param.layer in unnoticed and (why := _no_copies(watcher, param)):
            text = f"{param.name}: {why}, and the loader writes past what the engine's reload session looks at"
            raise PlanError(text, next_step=UNNOTICED)
    overwritten = sorted(watcher.overwritten)
    return WorkerPlan(params, watcher.routes, reload_only, sorted(watcher.opaque), computed, feeds, unnoticed, overwritten)


def _read_by(made_from: Mapping[str, Collection[Origin]]) -> tuple[dict[str, list[Region]], dict[str, list[str]]]:
    """Returns, for each tensor, the regions that parameters are computed from, and the layers of
    those parameters."""
    regions: dict[str, set[Region]] = defaultdict(set)
    layers: dict[str, set[str]] = defaultdict(set)
    for param, origins in made_from.items():
        for name, region in origins:
            regions[name].add(region)
            layers[name].add(layer_of(param))
    return {n: sorted(some, key=Region.__repr__) for n, some in regions.items()}, {n: sorted(some) for n, some in layers.items()}


def _no_copies(watcher: Watcher, param: ParamMeta) -> str | None:
    """Returns why copies and zeros cannot make a parameter, or None."""
    if param.name in watcher.opaque:
        return watcher.opaque[param.name]
    if param.name in watcher.constants:
        return "the loader fills a part of it with a number"
    if not param.buffer and not any(route.param == param.name for route in watcher.routes):
        return f"{param.kept}, which its layer cannot be made anew with" if param.kept else None
    return None


def _has_place(host: Host, live: Mapping[int, str], name: str, buffer: torch.Tensor) -> bool:
    """Whether the loader would write a buffer that was given under this name."""
    offered = {name: torch.empty_like(buffer, device="meta")}
    watcher = Watcher(host.model, offered, live, lambda: name, Layout())
    try:
        with torch.no_grad(), watcher, ReadOnly():
            host.load(iter(offered.items()))
    except Exception:
        return False
    return name in {route.param for route in watcher.routes} | watcher.opaque.keys()
