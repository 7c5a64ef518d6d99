"""Rebuilds layers from whose weights an engine derives something, where a rebuild is shown to give
the very same layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from instep.protocol import Region
from instep.receiver.lazy import Lazy
from instep.receiver.regions import Tensors
from instep.receiver.ways import DERIVED

if TYPE_CHECKING:
    from instep.receiver.apply import Applier


def try_rebuilding(applier: Applier, tensors: Tensors) -> None:
    """Promotes each layer that computes the same, bit for bit, when it is rebuilt as it did after
    the last session.

    Each layer is rebuilt from zeros first, which must change all that was found to be derived.
    Otherwise a rebuild that does nothing, or forgets something, would pass.
    """
    candidates = [layer for layer, reason in applier.reload.items() if reason.endswith(DERIVED) and _rebuildable(applier, layer)]
    if not candidates:
        return
    made, before = applier.look(), {layer: _computes(applier, layer) for layer in candidates}
    same = {layer for layer in candidates if before[layer] is not None}
    same = {layer for layer in same if _rebuilt(applier, layer, Lazy(tensors, torch.zeros_like))}
    applier.host.refresh()
    of_zeros = applier.look()
    same = {layer for layer in same if all(of_zeros.followed(made, place) for place in applier.derived[layer])}
    same = {layer for layer in same if not _equal(before[layer], _computes(applier, layer))}
    same = {layer for layer in same if _rebuilt(applier, layer, tensors)}
    applier.host.refresh()
    same = {layer for layer in same if _equal(before[layer], _computes(applier, layer))}
    if len(same) < len(candidates):  # the session's result is right: restore it
        for layer in (set(candidates) - same) & applier.routes.keys():  # a layer without routes keeps its reason
            applier.reload[layer] = "it is not the same when it is rebuilt"
        applier.session(tensors)
    for layer in same:
        applier.rebuild.add(layer)
        del applier.reload[layer]


def _rebuildable(applier: Applier, layer: str) -> bool:
    """Whether routes alone fill the layer, without padding or constants. A layer without routes is
    tied to another one, which is rebuilt."""
    params = [param for param in applier.plan.params if param.layer == layer and not (param.buffer and param.spare)]
    routed = sum(route.target.numel for route in applier.routes[layer] if route.tensor is not None) if layer in applier.routes else 0
    needed = sum(Region(0, param.shape, ()).numel for param in params if param.spare == 0)
    return applier.host.rebuilds(layer) and routed == needed and not any(param.spare for param in params if layer in applier.routes)


def _rebuilt(applier: Applier, layer: str, source: Tensors) -> bool:
    """Rebuilds a layer. Returns whether the engine's hook succeeded."""
    try:
        applier.rebuild_layer(layer, source)
    except Exception:  # the next session repairs the layer
        return False
    return True


def _computes(applier: Applier, layer: str) -> torch.Tensor | None:
    """Returns the layer's output, or None where the layer cannot run."""
    try:
        return applier.host.computes(layer)
    except Exception:
        return None


def _equal(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    return before is not None and now is not None and torch.equal(before, now)
