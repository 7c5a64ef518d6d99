"""Decides which layers need no reload session before a push pauses the engine.

Two models are loaded into scratch memory, a few layers at a time, with made-up weights that differ
in every element. The first is then given the weights of the second as a push gives them to a live
model: regions are copied, packed layers are rebuilt. A layer may take that way if both models are
the same afterwards, and if the live model differs from an initial load in nothing else than what
the way writes.

What this cannot decide, a reload session decides within the first commit (see `apply.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from instep.plan.region import view
from instep.protocol import Route, TensorMeta
from instep.receiver import Fresh
from instep.receiver.alike import differing, ids, is_registered
from instep.receiver.lazy import Lazy
from instep.receiver.memory import Memory
from instep.receiver.rebuilt import equal, output, rebuildable
from instep.receiver.regions import Tensors, fits, load_region
from instep.receiver.rehearsal import scrambled
from instep.receiver.ways import UNDECIDED, Reads

if TYPE_CHECKING:
    from instep.receiver.apply import Applier

Way = str | None
"""An attribute path from a layer. None stands for state outside of PyTorch."""

Found = dict[str, set[Way]]
"""Attribute paths, by the live model's layer."""


class Beforehand:
    """What is found of an applier's layers. `step` looks at one unit of the model, so that the
    engine can generate between two.

    direct: layers that copies serve. rebuilt: layers that a rebuild serves, each with the names of
    the attributes that it replaces. alike: all modules that are as an initial load leaves them.
    sure: whether it is known of all other state that it follows from other weights, or from none.
    """

    def __init__(self, applier: Applier, listed: Sequence[TensorMeta]) -> None:
        self.applier, self.host = applier, applier.host
        self.old, self.new = (scrambled(listed, self.host.device, turn) for turn in (0, 1))
        self.dtypes = {meta.name: meta.dtype for meta in listed}
        self.reads = Reads(applier.plan)
        self.direct: set[str] = set()
        self.rebuilt: dict[str, set[str]] = {}
        self.alike: set[str] = set()
        self.sure = True
        self._steps = self._run()

    def step(self) -> bool:
        """Looks at the next unit. Returns whether all were looked at. Writes nothing live."""
        with torch.no_grad():
            return next(self._steps, True)

    def _run(self) -> Iterator[bool]:
        models: list[Fresh] = []
        while len(models) < 2:
            try:
                fresh = self.host.fresh(0)
            except Exception:  # the comparison in the first commit says why
                return
            if fresh is None:
                return
            models.append(fresh)
            yield False
        self.filled = Memory(self.host.filled())
        self.stops = ids(self.host.model, *(fresh.model for fresh in models))
        for unit in models[1].units():
            try:
                self._look(unit, *models)
            except Exception:  # state of this unit may follow from the weights of another
                self.sure = False
            yield False
        if self.sure:
            self.applier.take(self)

    def _look(self, unit: Mapping[str, str], first: Fresh, second: Fresh) -> None:
        with first.loading(unit, self._wanted(unit, self.old)), second.loading(unit, self._wanted(unit, self.new)):
            derived, other = self._derived(unit, first, second)
            layers = {layer for layer in unit.values() if self.applier.reload.get(layer, UNDECIDED) == UNDECIDED} - other
            packed = {layer for layer in layers & derived.keys() if rebuildable(self.applier, layer)}
            direct = layers & self.applier.routes.keys() - derived.keys()
            replaced, wrong = self._push(unit, first, second, direct, packed)
        left = (derived.keys() - packed) | wrong
        found = (direct | packed) - wrong
        hidden = {layer for layer in left if None in derived.get(layer, ())}
        if left and found and not self._apart(unit, first, second, found, left, hidden):
            return
        self.direct |= found - packed
        self.rebuilt |= {layer: replaced[layer] for layer in found & packed}
        self.alike |= set(unit.values()) - left - other

    def _apart(
        self, unit: Mapping[str, str], first: Fresh, second: Fresh, found: Collection[str], left: Collection[str], hidden: Collection[str]
    ) -> bool:
        """Whether other weights of the layers `found` leave the state of those that are `left` as
        it is. hidden: layers whose state is compared by what they compute."""
        new = self.reads.names(found)
        mixed = Lazy({name: name for name in self.old}, lambda name: (self.new if name in new else self.old)[name])
        with first.loading(unit, self._wanted(unit, self.old)), second.loading(unit, self._wanted(unit, mixed)):
            places = differing(first.model, second.model, _itself(unit), self.stops)
            if any(place is not None and unit[name] in left for name, place in places):
                return False
            return all(equal(output(first, name), output(second, name)) for name, layer in unit.items() if layer in hidden)

    def _wanted(self, unit: Mapping[str, str], tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        return self.reads.offered(unit.values(), tensors)

    def _derived(self, unit: Mapping[str, str], first: Fresh, second: Fresh) -> tuple[Found, set[str]]:
        """Returns what layers hold that follows from weights and is not the weights themselves, and
        the layers whose live parameters or buffers are otherwise not those of an initial load."""
        one, two = (Memory(self._routed(fresh.model, unit).values()) for fresh in (first, second))
        follows, derived, other = defaultdict[str, set[Way]](set), Found(), set[str]()
        for name, place in differing(first.model, second.model, _itself(unit), self.stops):
            follows[unit[name]].add(place and place[0])
            if place is None or not _same_part(place[1], one, place[2], two):
                derived.setdefault(unit[name], set()).add(place and place[0])
        live = Memory(self._routed(self.host.model, _itself(unit.values())).values())
        for name, place in differing(self.host.model, second.model, unit, self.stops):
            if place is not None and _same_part(place[1], live, place[2], two):
                continue
            way, layer = place and place[0], unit[name]
            if way is None or way in follows[layer]:
                derived.setdefault(layer, set()).add(way)
            elif is_registered(second.model, name, way):
                other.add(layer)
            elif place is not None and isinstance(place[1], torch.Tensor) and not self.filled.covers(place[1]):
                self.sure = False  # it may follow from the weights of another unit
        return derived, other

    def _routed(self, model: torch.nn.Module, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Returns the tensors that routes fill, by the live model's names. names: those of modules
        in `model`, each with that in the live model."""
        found = {}
        for name, layer in names.items():
            module = model.get_submodule(name)
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and f"{layer}.{leaf}" in self.applier.params:
                    found[f"{layer}.{leaf}"] = tensor.detach()
        return found

    def _push(
        self, unit: Mapping[str, str], first: Fresh, second: Fresh, direct: Iterable[str], packed: Iterable[str]
    ) -> tuple[dict[str, set[str]], set[str]]:
        """Brings the second model's weights to the first one. Returns the attributes that each
        rebuild has replaced, and the layers in which the two models differ then."""
        known_as = {layer: name for name, layer in unit.items()}
        params = self._routed(first.model, unit)
        wrong = {layer for layer in direct if not self._copy(layer, params)}
        before = {layer: output(first, known_as[layer]) for layer in packed}
        replaced = {layer: self._rebuild(first, layer, known_as[layer]) for layer in packed}
        if replaced:
            first.refresh()
        for layer in replaced:
            now = output(first, known_as[layer])
            if equal(before[layer], now) or not equal(now, output(second, known_as[layer])):
                wrong.add(layer)
        left = differing(first.model, second.model, _itself(unit), self.stops)
        return replaced, wrong | {unit[name] for name, place in left if place is not None}

    def _copy(self, layer: str, params: Mapping[str, torch.Tensor]) -> bool:
        by_tensor: dict[str, list[Route]] = defaultdict(list)
        for route in self.applier.routes[layer]:
            if route.tensor is not None:
                if not fits(params[route.param], route, self.dtypes[route.tensor]):
                    return False
                by_tensor[route.tensor].append(route)
        for name, routes in by_tensor.items():
            tensor = self.new[name]  # made once: it may be read by hundreds of routes
            for route in routes:
                assert route.source is not None
                load_region(params[route.param], route.target, view(tensor, route.source))
        return True

    def _rebuild(self, fresh: Fresh, layer: str, name: str) -> set[str]:
        """Rebuilds a layer of a second model. Returns the names of attributes that have another
        object then."""
        held = vars(fresh.model.get_submodule(name))
        had = dict(held)
        if layer in self.applier.routes:
            fresh.rebuild(name, self.applier.filler(layer, self.new))
        return {attribute for attribute, value in held.items() if had.get(attribute) is not value}


def _itself(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def _same_part(one: object, mine: Memory, other: object, theirs: Memory) -> bool:
    """Whether both are the same part of the weights of their models."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    same = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return same and mine.covers(one) and theirs.covers(other)
