"""How a prepared version gets into live storage, and which layer takes which way.

*reload*: the engine's own reload session; right for every layer, and slow. *direct*: regions copied
straight into live storage. Every layer starts on reload. Most are promoted before a push pauses
the engine (`beforehand.py`). For the others the first commit runs the session twice, with made-up
weights and then with the version's; what else differs between the two sessions is derived from
weights. A layer is promoted if it holds none of that, and if the second session has changed its
live bytes, read back through its routes, into the version's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from instep.errors import DigestMismatch
from instep.protocol import Route, TensorMeta, WorkerPlan
from instep.receiver import Fill, Host
from instep.receiver.beforehand import Beforehand
from instep.receiver.copies import Copies, live_tensors
from instep.receiver.evidence import Holdings, Place
from instep.receiver.initial import Compared, compare
from instep.receiver.rebuilt import try_rebuilding
from instep.receiver.regions import Tensors, copy_regions, offered
from instep.receiver.rehearsal import scrambled
from instep.receiver.structure import Structure
from instep.receiver.watcher import layer_of
from instep.receiver.ways import DERIVED, OTHERWISE, UNTOUCHED, Ways


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What the model held after a reload session with other weights."""

    look: Holdings
    held: Sequence[object]


class Arrival(Protocol):
    """A version's bytes during one commit (see `arrival.py`)."""

    once: bool
    """Whether they pass by, and can be moved only once."""
    listed: Sequence[TensorMeta]
    """The version's tensors."""

    def move(self, copies: Copies, watched: Copies | None, *, in_turn: bool) -> Tensors:
        """Starts the copies of direct layers. Returns the tensors that other layers read, which are
        valid until the commit ends.

        watched: routes that the reload session fills, compared afterwards. in_turn: whether each
        tensor is asked for once, in the order of the result. Then tensors that pass by in buckets
        need not be kept.
        """

    def held(self, watched: Copies) -> Sequence[object]:
        """Returns, for each route, what live storage holds at its target now."""

    def brought(self, watched: Copies) -> Sequence[object]:
        """Returns, for each route, what the route brings. It equals the entry of `held` if the
        bytes are the same."""

    def settle(self) -> None:
        """Waits until everything has been moved."""


class Applier(Ways):
    """Writes versions into one worker's layers, each in its way.

    read: tensors that the last commit read back. derived: places of what follows from weights, by
    the modules that hold it. alike: modules that were compared with an initial load before a
    commit. compared: the first commit's comparison of the others.
    """

    def __init__(self, host: Host, plan: WorkerPlan) -> None:
        super().__init__(plan, host.always_reloads)
        self.host = host
        self.derived: dict[str, list[Place]] = {}
        self.read: set[str] = set()
        self.alike: set[str] = set()
        self.compared: Compared | None = None
        self._beforehand: Beforehand | None = None
        self._names = {route.tensor for route in self.plan.routes if route.tensor is not None}
        self._read_names: set[str] | None = None
        self.reloaded = False  # whether the last commit ran a session
        self._copies: Copies | None = None
        self._watch: Copies | None = None
        self._structure: Structure | None = None  # as of the last promotion

    def decide(self, listed: Sequence[TensorMeta]) -> bool:
        """Finds, without a pause, which layers need no reload session: a part of the model in each
        call. Returns whether all is found. listed: the tensors that were traced."""
        if not self.undecided or not self.host.decides_beforehand:
            return True
        if self._beforehand is None:
            self._beforehand = Beforehand(self, listed)
        return self._beforehand.step()

    def take(self, found: Beforehand) -> None:
        """Has layers take the ways that were found without a pause."""
        self.alike = found.alike
        for layer in found.direct:
            self.promote(layer)
        for layer, attributes in found.rebuilt.items():
            self.reload.pop(layer, None)
            self.rebuild.add(layer)
            self.derived[layer] = [(layer, name) for name in attributes]
        self._remember()
        self.copies()

    def apply(self, arrival: Arrival) -> None:
        """Writes every routed parameter. Raises whatever the engine's loader raises; the worker is
        dirty then."""
        copies = self.copies(look=arrival.once)
        watched = self._watched()
        first = watched is not None and self.undecided
        in_turn = arrival.once and first and not self.promoted | {*self.plan.unnoticed}
        tensors = arrival.move(copies, watched, in_turn=in_turn)
        if not arrival.once and (now := self.copies()) is not copies:  # checked while the GPU copies
            tensors = arrival.move(now, watched, in_turn=False)  # only the old `Copies` holds what was written
        for layer in self.rebuild:
            self.rebuild_layer(layer, tensors)
        if self.rebuild:
            self.host.refresh()
        self.reloaded = bool(self.reload)
        self.read = set()
        if not self.reload:
            return
        rehearsed = self._rehearse(arrival, watched) if first and watched else None
        if in_turn and rehearsed:  # made-up weights: the version's are gone after loading
            self._compare(arrival, scrambled(arrival.listed, self.host.device))
        self.session(tensors)
        look = None
        if rehearsed:
            self._find_derived(rehearsed.look, look := self.look())
        if not in_turn:
            self._compare(arrival, tensors)
            try_rebuilding(self, tensors, look)
        if watched and watched.compared:
            self._read_back(arrival, watched, rehearsed)
        self._remember()

    def _remember(self) -> None:
        """Notes which objects the promoted layers hold."""
        if self.promoted != (self._structure.layers.keys() if self._structure else set()):
            derived = {layer: [way for _, way in self.derived.get(layer, ())] for layer in self.promoted}
            self._structure = Structure(self.host.model, derived)

    def _compare(self, arrival: Arrival, tensors: Tensors) -> None:
        """Compares the model with the engine's initial load, once: later sessions run the same code
        with other weights. tensors: those that the last session was given."""
        if self.compared is None:
            others = scrambled(arrival.listed, self.host.device, turn=1)
            self.compared = compare(self.host, self.plan, tensors, others, self.alike)

    def trusted(self) -> dict[str, str]:
        """Returns layers whose state could not be read back or compared, and why. They hold what
        the engine's loader made of the right bytes."""
        done = self.compared or Compared()
        unread = {layer: why for layer, why in self.unproved.items() if layer not in done.layers}
        return unread | {layer: why for layer, why in done.unproved.items() if layer in self.reload.keys() | self.rebuild}

    def stays(self) -> bool:
        """Whether what was proved still holds: the model has the same modules, and direct layers
        have not moved."""
        lie = self._copies is None or self._copies.stay(self.host.model)
        return lie and (self._structure is None or self._structure.stays(self.host.model))

    def copies(self, *, look: bool = True) -> Copies:
        """Returns the copies of the direct layers. It is the same object until a layer is promoted
        or moves.

        look: whether to check that they have not moved. The caller that passes False checks later.
        """
        if self._copies is None or self._copies.layers != self.direct:
            rest = (route.tensor for layer in self.routes.keys() - self.direct for route in self.routes[layer] if route.tensor)
            others = frozenset(rest) | self.plan.computed.keys()
            direct = frozenset(self.direct)
            self._copies = Copies(self.host.model, direct, self._asked(direct), self.plan.routes, others=others)
        elif look:
            self._copies = self._copies.renewed(self.host.model)
        return self._copies

    def wanted(self, metas: Mapping[str, TensorMeta]) -> Collection[str]:
        """Returns the names of tensors that this worker's layers read. metas: of the tensors that
        were traced."""
        if self._read_names is None:  # looked up once: an engine is paused meanwhile
            self._read_names = {metas[name].alias_of or name for name in self._names}
        return self._read_names

    def _asked(self, layers: frozenset[str]) -> list[Route]:
        """Returns the routes that read a tensor. Constants are left out: the first load has filled
        them in."""
        return [route for layer in sorted(layers) for route in self.routes.get(layer, ()) if route.tensor is not None]

    def told(self) -> dict[str, Any]:
        """Returns what a `WorkerReceipt` says of the layers."""
        compared = (self.alike | (self.compared or Compared()).layers) & (self.routes.keys() | self.plan.reload_only.keys())
        ways = {"direct": sorted(self.direct), "rebuilt": sorted(self.rebuild), "reload": dict(sorted(self.reload.items()))}
        return {**ways, "unproved": self.trusted(), "compared": len(compared)}

    def session(self, tensors: Tensors) -> None:
        """Runs the engine's reload session for the layers on reload. Layers that the session leaves
        as they are, are rebuilt after it."""
        with self.host.reload():
            self.host.load(self._wanted(tensors))
        unnoticed = [layer for layer in self.plan.unnoticed if layer in self.reload]
        for layer in unnoticed:
            self.rebuild_layer(layer, tensors)
        if unnoticed:
            self.host.refresh()

    def rebuild_layer(self, layer: str, tensors: Tensors) -> None:
        if layer in self.routes:
            self.host.rebuild(layer, self.filler(layer, tensors))

    def filler(self, layer: str, tensors: Tensors) -> Fill:
        def fill(params: Tensors) -> None:
            named = {route.param: params[route.param.rpartition(".")[2]] for route in self.routes[layer]}
            for param in named.values() if layer in self.plan.unnoticed else ():
                param.zero_()  # constants and padding: the trace has refused all others
            copy_regions(self.routes[layer], named, tensors)

        return fill

    def _wanted(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors that layers on reload read, in the order of the source."""
        layers = self.reload.keys() - {*self.plan.unnoticed}
        names = {route.tensor for layer, routes in self.routes.items() if layer in layers for route in routes} | self.plan.computed.keys()
        return offered(self.plan, names, tensors)

    def _watched(self) -> Copies | None:
        """Returns the copies of layers that are not direct. It is the same object until the set of
        layers changes or one moves."""
        layers = frozenset(self.routes.keys() - self.direct)
        compared = layers & self.reload.keys() - self.unproved.keys()
        if not layers:
            return None
        if self._watch is None or (self._watch.layers, self._watch.compared) != (layers, compared):
            self._watch = Copies(self.host.model, layers, self._asked(layers), self.plan.routes, compared=compared)
        else:
            self._watch = self._watch.renewed(self.host.model)
        return self._watch

    def look(self) -> Holdings:
        """Records all that the engine's modules hold beside the weights."""
        live = dict(live_tensors(self.host.model))
        return Holdings(self.host.model, [*(live[name] for name in self.params), *self.host.filled()])

    def _rehearse(self, arrival: Arrival, watched: Copies) -> Rehearsed | None:
        """Runs a reload session with made-up weights. Returns None, and leaves every layer on
        reload, if the engine's loader refuses them."""
        try:
            self.session(scrambled(arrival.listed, self.host.device))
        except Exception as error:
            for layer in self.reload:
                self.keep_on_reload(layer, f"the engine's loader did not take other weights: {type(error).__name__}: {error}")
            return None
        return Rehearsed(self.look(), arrival.held(watched.renewed(self.host.model)))

    def _find_derived(self, before: Holdings, after: Holdings) -> None:
        """Keeps layers on reload whose modules hold what is derived from weights.

        A module without routes counts too. What it holds follows from some layer's weights, but it
        is not known which. The session, which rebuilds the module, runs on every commit.
        """
        self.derived = after.changed(before)
        for name, places in self.derived.items():
            self.keep_on_reload(name, f"{min(way for _, way in places)}{DERIVED}")

    def _read_back(self, arrival: Arrival, watched: Copies, rehearsed: Rehearsed | None) -> None:
        """Compares layers on reload with what was brought, and decides about those that are not
        judged yet.

        Raises `DigestMismatch` for a layer that differs now and was equal in an earlier commit.
        """
        routes, brought = watched.routes, arrival.brought(watched)
        held = arrival.held(watched.renewed(self.host.model))
        layers = [layer_of(route.param) for route in routes]
        different = {layer: route for layer, route, now, new in zip(layers, routes, held, brought, strict=True) if now != new}
        before = rehearsed.held if rehearsed else [None] * len(routes)
        same = {layer for layer, was, new in zip(layers, before, brought, strict=True) if was == new}
        for layer in watched.compared & self.reload.keys():
            route = different.get(layer)
            if route is not None and layer in self.comparable:
                text = f"{route.param} does not hold the bytes of {route.tensor} after the engine's reload session"
                raise DigestMismatch(text, tensor=route.tensor)
            if route is not None:
                self.unproved[layer] = f"{route.param}{OTHERWISE}"
                self.keep_on_reload(layer, self.unproved[layer])
                continue
            self.comparable.add(layer)
            if layer in same:
                self.keep_on_reload(layer, UNTOUCHED)
            else:
                self.promote(layer)
        self.read = {route.tensor for route in routes if route.tensor and layer_of(route.param) in self.comparable & self.reload.keys()}
