"""How a prepared version gets into live storage, and which layer takes which way.

*reload*: the engine's own reload session; right for every layer, and slow. *direct*: regions copied straight into live storage. Every
layer starts on reload. It is promoted after a commit that changed its weights, if its live bytes, read back through its routes, equal the
source, and if the session neither replaced an attribute of it nor changed a tensor that it holds beside its parameters: then nothing is
derived from its weights that a plain copy would leave stale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Protocol

import torch

from instep.protocol import Region, Route, WorkerPlan
from instep.receiver import Host
from instep.receiver.copies import Copies
from instep.receiver.regions import Tensors, bits, copy_regions
from instep.receiver.trace import layer_of

UNPROVED = "not proved yet"
DERIVED = " is derived from weights"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen before a reload session: the attributes of every module, and what layers that are not proved yet held."""

    attributes: dict[str, dict[str, object]]
    watched: Copies
    held: Sequence[object]


class Arrival(Protocol):
    """A version's bytes during one commit (see `arrival.py`)."""

    once: bool
    """Whether they pass by, and can be moved only once."""

    def move(self, copies: Copies, watched: Copies | None, *, in_turn: bool) -> Tensors:
        """Begins to make the copies. What other layers read is in the result; it is good until the commit ends.

        watched: copies that are not to be made. The reload session does, and is looked at. in_turn: each tensor is asked for once, in the
        order of the result, so that those of bytes which pass by need not be kept.
        """

    def held(self, watched: Copies) -> Sequence[object]:
        """What live storage holds now where each route leads."""

    def brought(self, watched: Copies) -> Sequence[object]:
        """What each route brings: equal to what is held there, if that is the same, bit for bit."""

    def settle(self) -> None:
        """Waits until everything has been moved."""


@dataclass
class Applier:
    """The copies of one worker. `direct` and `rebuild` hold the promoted layers, `reload` the others with the reason."""

    host: Host
    plan: WorkerPlan
    direct: set[str] = field(default_factory=set)
    rebuild: set[str] = field(default_factory=set)
    reload: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.routes: dict[str, list[Route]] = defaultdict(list)
        for route in self.plan.routes:
            self.routes[layer_of(route.param)].append(route)
        self.reload = {layer: self.plan.reload_only.get(layer, UNPROVED) for layer in self.routes.keys() | self.plan.reload_only.keys()}
        self.reloaded = False  # in the last commit
        self._copies: Copies | None = None
        self._unproved: Copies | None = None

    def apply(self, arrival: Arrival) -> None:
        """Writes every routed parameter. Raises whatever the engine's loader raises; the worker is dirty then."""
        copies = self.copies(look=arrival.once)
        watched = self._watched()
        in_turn = arrival.once and watched is not None and not self.direct | self.rebuild  # as in the first commit
        tensors = arrival.move(copies, watched, in_turn=in_turn)
        if not arrival.once and (now := self.copies()) is not copies:  # looked at while a GPU is at it
            tensors = arrival.move(now, watched, in_turn=False)  # what was written instead is kept by nobody but `Copies`
        for layer in self.rebuild:
            self._rebuild(layer, tensors)
        if self.rebuild:
            self.host.refresh()
        self.reloaded = bool(self.reload)
        if not self.reload:
            return
        evidence = Evidence(self._attributes(), watched, arrival.held(watched)) if watched else None
        with self.host.reload():
            self.host.load(self._wanted(tensors))
        if evidence is not None:
            self._promote(evidence, arrival)
        if not in_turn:
            self._promote_rebuilt(tensors)

    def copies(self, *, look: bool = True) -> Copies:
        """Of the direct layers: the same object for as long as those are the same and lie where they lay.

        look: at where they lie; otherwise somebody else does.
        """
        if self._copies is None or self._copies.layers != self.direct:
            # Constants are left out: they were filled in by the first load.
            of_direct: dict[bool, list[Route]] = {True: [], False: []}
            for layer in sorted(self.routes):
                of_direct[layer in self.direct] += [route for route in self.routes[layer] if route.tensor is not None]
            known = not self.reload.keys() & self.plan.reload_only.keys()
            others = frozenset(route.tensor for route in of_direct[False] if route.tensor is not None) if known else None
            self._copies = Copies(self.host.model, frozenset(self.direct), of_direct[True], others)
        elif look:
            self._copies = self._copies.renewed(self.host.model)
        return self._copies

    def layers(self) -> tuple[list[str], list[str], dict[str, str]]:
        """Which take which way: `direct`, `rebuild` and `reload`, in order."""
        return sorted(self.direct), sorted(self.rebuild), dict(sorted(self.reload.items()))

    def _wanted(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that layers on reload read, in their order; all of them where a layer's reads are not known."""
        names = {route.tensor for layer, routes in self.routes.items() if layer in self.reload for route in routes}
        every = any(layer in self.plan.reload_only for layer in self.reload)
        yield from ((name, tensors[name]) for name in tensors if every or name in names)

    def _watched(self) -> Copies | None:
        """What layers read of which it is not known yet whether plain copies would do: the same object as `copies` has it, as layers that a
        trainer never changes stay so."""
        layers = frozenset(layer for layer, reason in self.reload.items() if reason == UNPROVED)
        if not layers:
            return None
        if self._unproved is None or self._unproved.layers != layers:
            routes = [route for layer in sorted(layers & self.routes.keys()) for route in self.routes[layer] if route.tensor is not None]
            self._unproved = Copies(self.host.model, layers, routes, None)
        else:
            self._unproved = self._unproved.renewed(self.host.model)
        return self._unproved

    def _attributes(self) -> dict[str, dict[str, object]]:
        return {name: attributes(module) for name, module in self.host.model.named_modules(remove_duplicate=False)}

    def _promote(self, before: Evidence, arrival: Arrival) -> None:
        """Decides about layers whose weights this commit changed; the others say nothing of what follows from their weights."""
        for name, now in self._attributes().items():
            changed = changes(before.attributes[name], now)
            if changed and self.reload.get(name, UNPROVED) == UNPROVED:
                # Also of a layer without routes, or one that is direct by now: it follows from some layer's weights, we cannot tell
                # which. The session, which rebuilds it, runs on every commit.
                self.reload[name] = f"{changed}{DERIVED}"
                self.direct.discard(name)
        routes, brought = before.watched.routes, arrival.brought(before.watched)
        held = arrival.held(before.watched.renewed(self.host.model))
        stale = {layer_of(r.param) for r, was, new in zip(routes, before.held, brought, strict=True) if was != new}
        different = {layer_of(r.param): r.param for r, now, new in zip(routes, held, brought, strict=True) if now != new}
        for layer in stale:
            if self.reload.get(layer) != UNPROVED:
                continue
            if layer in different:
                self.reload[layer] = f"{different[layer]} is not stored as the checkpoint has it"
            else:
                self.direct.add(layer)
                del self.reload[layer]

    def _promote_rebuilt(self, tensors: Tensors) -> None:
        """Layers from whose weights the engine derives something, if deriving it from copied regions gives the very same layer.

        From zeros first: a rebuild that does nothing would make of the same weights the same.
        """
        candidates = [layer for layer, reason in self.reload.items() if reason.endswith(DERIVED) and self._rebuildable(layer)]
        before = {layer: self.host.computes(layer) for layer in candidates}
        same = set(candidates)
        if candidates:
            for source, as_before in ((Zeros(tensors), False), (tensors, True)):
                for layer in candidates:
                    self._rebuild(layer, source)
                self.host.refresh()
                same &= {layer for layer in candidates if torch.equal(before[layer], self.host.computes(layer)) == as_before}
        if len(same) < len(candidates):  # what the session has made is right, so it makes it again
            for layer in (set(candidates) - same) & self.routes.keys():  # one without routes keeps its reason: its partner is not rebuilt
                self.reload[layer] = "it is not the same when it is rebuilt"
            with self.host.reload():
                self.host.load(self._wanted(tensors))
        for layer in same:
            self.rebuild.add(layer)
            del self.reload[layer]

    def _rebuildable(self, layer: str) -> bool:
        """Whether routes alone fill the layer: no padding, no constants. One without routes is tied to another, which is rebuilt."""
        params = [param for param in self.plan.params if param.layer == layer]
        routed = sum(route.target.numel for route in self.routes[layer] if route.tensor is not None) if layer in self.routes else 0
        needed = sum(Region(0, param.shape, ()).numel for param in params if param.spare == 0)
        return self.host.rebuilds(layer) and routed == needed and not any(param.spare for param in params if layer in self.routes)

    def _rebuild(self, layer: str, tensors: Tensors) -> None:
        def fill(params: Tensors) -> None:
            named = {route.param: params[route.param.rpartition(".")[2]] for route in self.routes[layer]}
            copy_regions(self.routes[layer], named, tensors)

        if layer in self.routes:
            self.host.rebuild(layer, fill)


class Zeros(Mapping[str, torch.Tensor]):
    """Tensors of the same names and shapes, made when they are asked for."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.zeros_like(self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def attributes(module: torch.nn.Module) -> dict[str, object]:
    """What a layer holds beside its parameters and submodules, one level into its quantisation method. Values are kept alive, so that
    an object that is replaced cannot be mistaken for its successor; of tensors a sample is taken, so that a change in place is seen."""
    found: dict[str, object] = {}
    for prefix, owner in (("", module), ("quant_method.", getattr(module, "quant_method", None))):
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            if name not in ("_parameters", "_modules", "_buffers", "quant_method"):
                found[prefix + name] = sample(value) if isinstance(value, torch.Tensor) else value
                found |= {f"{prefix}{name}[{key}]": sample(item) for key, item in _items(value) if isinstance(item, torch.Tensor)}
    return found | {name: buffer if buffer is None else sample(buffer) for name, buffer in module._buffers.items()}


def _items(value: object) -> Iterable[tuple[object, object]]:
    """What a container holds: its tensors may be replaced while it stays the same object."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """A few thousand elements, evenly spread. What is computed from weights differs almost everywhere when they change, and a layer may
    hold gigabytes (a KV cache)."""
    order = sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)
    dense = tensor.detach().permute(order)
    flat = dense.view(-1) if dense.is_contiguous() else dense.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].cpu().clone()


SAMPLE = 4096
SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, MethodType)


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """The first attribute that was replaced, added or changed."""
    for name in (*after, *(before.keys() - after.keys())):
        old, new = before.get(name), after.get(name)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if old.dtype != new.dtype or old.shape != new.shape or not torch.equal(bits(old.contiguous()), bits(new.contiguous())):
                return name
        elif old is not new and not (isinstance(old, SIMPLE) and isinstance(new, SIMPLE) and old == new):
            return name
    return None
