"""Which way each layer of a worker takes, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from instep.protocol import Route, WorkerPlan
from instep.receiver.regions import Tensors, offered
from instep.receiver.watcher import layer_of

UNDECIDED = "not proved yet"
OTHERWISE = " is not stored as the checkpoint has it"
UNTOUCHED = "the reload session left its weights as they were when it was given different ones"
DERIVED = " is derived from weights"


class Reads:
    """What each layer of a plan reads."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self._names: dict[str, set[str]] = defaultdict(set)
        for route in plan.routes:
            if route.tensor is not None:
                self._names[layer_of(route.param)].add(route.tensor)
        for name, layers in plan.feeds.items():
            for layer in layers:
                self._names[layer].add(name)

    def names(self, layers: Iterable[str]) -> set[str]:
        """Returns the names of the checkpoint tensors that some layers read."""
        return {name for layer in layers for name in self._names.get(layer, ())}

    def offered(self, layers: Iterable[str], tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields those of the tensors that some layers read, as `regions.offered` does."""
        return offered(self.plan, self.names(layers), tensors)


class Ways:
    """The ways of one worker's layers. A layer leaves `reload` once, and does not come back.

    direct: layers that are copied. rebuild: layers that are made anew from copied regions. reload:
    the others, each with the reason. unproved: layers on reload that cannot be read back, and why.
    comparable: layers that can. routes: those of each layer. params: all that they fill.
    """

    def __init__(self, plan: WorkerPlan, always_reloads: str | None) -> None:
        self.plan = plan
        self.routes: dict[str, list[Route]] = defaultdict(list)
        for route in plan.routes:
            self.routes[layer_of(route.param)].append(route)
        self.params = {route.param for route in plan.routes}
        self.direct: set[str] = set()
        self.rebuild: set[str] = set()
        layers = self.routes.keys() | plan.reload_only.keys()
        self.reload = {layer: plan.reload_only.get(layer, always_reloads or UNDECIDED) for layer in layers}
        self.unproved = dict(plan.reload_only)
        self.comparable: set[str] = set()

    @property
    def promoted(self) -> set[str]:
        return self.direct | self.rebuild

    @property
    def undecided(self) -> bool:
        """Whether no session has shown yet what a layer may take."""
        return UNDECIDED in self.reload.values()

    def keep_on_reload(self, layer: str, why: str) -> None:
        """Keeps a layer, or a module without routes, on reload. One that stays for another reason
        keeps that reason."""
        if self.reload.get(layer, UNDECIDED) == UNDECIDED:
            self.reload[layer] = why

    def promote(self, layer: str) -> None:
        """Has a layer copied from now on, unless it stays on reload for some reason."""
        if self.reload[layer] == UNDECIDED:
            del self.reload[layer]
            self.direct.add(layer)
