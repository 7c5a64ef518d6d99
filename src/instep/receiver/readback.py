"""Reads back what a worker holds of checkpoint tensors, to compare it with a checkpoint. Nothing is
changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from instep.digest import as_bytes, partial, seed_of, unordered
from instep.plan.region import view
from instep.protocol import ParamMeta, Route, TensorMeta, WorkerPlan
from instep.readback import DigestRequest, Held, Part
from instep.receiver import Host
from instep.receiver.apply import Applier
from instep.receiver.copies import live_tensors
from instep.receiver.trace import trace
from instep.receiver.ways import OTHERWISE

COMPUTED = "the engine's loader computes with it"
OTHER_LAYOUT = "the engine keeps {} in a layout of its own"


def held(host: Host, applier: Applier | None, wanted: DigestRequest) -> Held:
    """Sums up what a worker holds of the wanted tensors. applier: that of an earlier push of these
    tensors, which knows more of the layers than their shapes tell; None if there was none.

    Raises `PlanError` where the worker's loader refuses the tensors.
    """
    plan = applier.plan if applier is not None else trace(host, wanted.tensors)
    metas, names = {meta.name: meta for meta in wanted.tensors}, set(wanted.names)
    live, params = dict(live_tensors(host.model)), {param.name: param for param in plan.params}
    parts, unread = [], {}
    sums: dict[str, int] = {}  # of whole parameters
    for (name, param), routes in _by_tensor(plan, metas, names).items():
        meta = params[param]
        why = _unreadable(meta, live.get(param), plan, applier)
        if why is not None:
            unread[name] = why
        else:
            proved = applier is not None and meta.layer in applier.direct | applier.comparable
            stored = TensorMeta(name, meta.dtype, metas[name].shape)
            if wanted.unordered and param not in sums:
                sums[param] = unordered(live[param])
            total = sums[param] if wanted.unordered else _sum(stored, live[param], routes)
            regions = list(dict.fromkeys(route.source for route in routes if route.source))
            parts.append(Part(name, param, meta.dtype, regions, total, proved))
    unread |= dict.fromkeys((names & plan.computed.keys()) - unread.keys() - {part.tensor for part in parts}, COMPUTED)
    return Held(parts, unread)


def _by_tensor(plan: WorkerPlan, metas: Mapping[str, TensorMeta], names: set[str]) -> dict[tuple[str, str], list[Route]]:
    """Returns routes by tensor and parameter. A route that reads an alias is listed under the
    tensor that the alias stands for."""
    found: dict[tuple[str, str], list[Route]] = defaultdict(list)
    for route in plan.routes:
        name = (metas[route.tensor].alias_of or route.tensor) if route.tensor is not None else None
        if name in names:
            found[name, route.param].append(route)
    return found


def _unreadable(param: ParamMeta, live: torch.Tensor | None, plan: WorkerPlan, applier: Applier | None) -> str | None:
    if param.layer in plan.reload_only:
        return COMPUTED
    other = applier is not None and OTHERWISE in applier.unproved.get(param.layer, "")
    fits = live is not None and tuple(live.shape) == param.shape and str(live.dtype) == f"torch.{param.dtype}"
    return OTHER_LAYOUT.format(param.name) if other or not fits else None


def _sum(meta: TensorMeta, live: torch.Tensor, routes: Sequence[Route]) -> int:
    """Returns the sum of what the routes brought, with zeros elsewhere: sums of parts add up to the
    sum of the whole (see `digest.py`)."""
    whole = torch.zeros(meta.shape, dtype=live.dtype)
    _read(whole, live, routes)
    return partial(as_bytes(whole), seed_of(meta))


def read_back(host: Host, plan: WorkerPlan, metas: Mapping[str, TensorMeta], names: set[str]) -> dict[str, torch.Tensor]:
    """Returns what a worker holds of checkpoint tensors, in host memory, with zeros where it holds
    nothing. Only for layers that store tensors as they came."""
    live = dict(live_tensors(host.model))
    found = {name: torch.zeros(metas[name].shape, dtype=getattr(torch, metas[name].dtype)) for name in names}
    for (name, param), routes in _by_tensor(plan, metas, names).items():
        _read(found[name], live[param], routes)
    return found


def _read(whole: torch.Tensor, live: torch.Tensor, routes: Sequence[Route]) -> None:
    live = live.contiguous()
    for route in routes:
        assert route.source is not None
        view(whole, route.source).copy_(view(live, route.target))
