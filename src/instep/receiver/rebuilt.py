"""Rebuilds layers from whose weights an engine derives something, where a rebuild is shown to give
the very same layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from instep.protocol import Region
from instep.receiver import Fresh, Host
from instep.receiver.lazy import Lazy
from instep.receiver.regions import Tensors
from instep.receiver.ways import DERIVED

if TYPE_CHECKING:
    from instep.receiver.apply import Applier
    from instep.receiver.evidence import Holdings


def try_rebuilding(applier: Applier, tensors: Tensors, look: Holdings | None) -> None:
    """Promotes each layer that computes the same, bit for bit, when it is rebuilt as it did after
    the last session. look: what the model holds since then, where it was recorded.

    Each layer is rebuilt from zeros first, which must change all that was found to be derived.
    Otherwise a rebuild that does nothing, or forgets something, would pass.
    """
    candidates = [layer for layer, reason in applier.reload.items() if reason.endswith(DERIVED) and rebuildable(applier, layer)]
    if not candidates:
        return
    trial = _Trial(candidates)
    made, before = look or applier.look(), {layer: output(applier.host, layer) for layer in candidates}
    trial.fail("it cannot be run alone", [layer for layer in candidates if before[layer] is None])
    trial.rebuild(applier, Lazy(tensors, torch.zeros_like))
    of_zeros = applier.look()
    for layer in trial.left():
        if stuck := [place[1] for place in applier.derived[layer] if not of_zeros.followed(made, place)]:
            trial.fail(f"{min(stuck)} stays as it is when the layer is rebuilt from zeros", [layer])
    unmoved = [layer for layer in trial.left() if equal(before[layer], output(applier.host, layer))]
    trial.fail("it computes the same when it is rebuilt from zeros", unmoved)
    trial.rebuild(applier, tensors)
    different = [layer for layer in trial.left() if not equal(before[layer], output(applier.host, layer))]
    trial.fail("it does not compute the same when it is rebuilt", different)
    if trial.failed:  # the session's result is right: restore it
        for layer in trial.failed.keys() & applier.routes.keys():  # a layer without routes keeps its reason
            applier.reload[layer] += f"; {trial.failed[layer]}"
        applier.session(tensors)
    for layer in trial.left():
        applier.rebuild.add(layer)
        del applier.reload[layer]


class _Trial:
    """Layers that may be promoted. failed: why those that may not cannot be rebuilt."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = layers
        self.failed: dict[str, str] = {}

    def left(self) -> list[str]:
        return [layer for layer in self.layers if layer not in self.failed]

    def fail(self, why: str, layers: Iterable[str]) -> None:
        for layer in layers:
            self.failed.setdefault(layer, why)

    def rebuild(self, applier: Applier, source: Tensors) -> None:
        for layer in self.left():
            try:
                applier.rebuild_layer(layer, source)
            except Exception as error:  # the next session repairs the layer
                self.fail(f"rebuilding it raised {type(error).__name__}: {error}", [layer])
        applier.host.refresh()


def rebuildable(applier: Applier, layer: str) -> bool:
    """Whether routes alone fill the layer, without padding or constants. A layer without routes is
    tied to another one, which is rebuilt."""
    params = [param for param in applier.plan.params if param.layer == layer and not (param.buffer and param.spare)]
    routed = sum(route.target.numel for route in applier.routes[layer] if route.tensor is not None) if layer in applier.routes else 0
    needed = sum(Region(0, param.shape, ()).numel for param in params if param.spare == 0)
    return applier.host.rebuilds(layer) and routed == needed and not any(param.spare for param in params if layer in applier.routes)


def output(model: Host | Fresh, layer: str) -> torch.Tensor | None:
    """Returns a layer's output for a fixed input, or None where the layer cannot run."""
    try:
        return model.computes(layer)
    except Exception:
        return None


def equal(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    return before is not None and now is not None and torch.equal(before, now)
