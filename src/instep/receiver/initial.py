"""Compares what a reload session leaves with what the engine's initial load makes of the same
bytes.

Bytes that are read back show that a session brought them. They do not show that the session made
all that the engine derives from them anew, or that it left everything else alone. An initial load
is right in both: every start of the engine from a checkpoint is one. So a second model is loaded,
a few layers at a time, into memory of its own, and compared with the live one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from instep.errors import ApplyError
from instep.protocol import WorkerPlan
from instep.receiver import Fresh, Host
from instep.receiver.alike import Difference, Kind, alike, differences, ids, is_undetermined, other_values
from instep.receiver.regions import Tensors
from instep.receiver.ways import Reads

COMPUTES = "what it computes"
NEXT = (
    "this engine reloads the model wrongly, and pushing again does not help: restart it from a checkpoint, and take another "
    "version of its software or report this one; `instep plan` tries a version without a trainer"
)


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison. layers: modules that hold what an initial load makes of the same
    bytes. unproved: modules that could not be compared, and why."""

    layers: frozenset[str] = frozenset()
    unproved: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def compare(host: Host, plan: WorkerPlan, tensors: Tensors, others: Tensors, known: Collection[str] = ()) -> Compared:
    """Compares what a reload session has left in `host` with what the engine's initial load makes
    of the same weights.

    tensors: those that the session was given last. others: tensors of the same names and shapes
    that differ from them in every element. known: modules that were compared before.

    Raises `ApplyError`, naming the first layer that differs, what of it, and the engine's software.
    Nothing live is written.
    """
    started = time.perf_counter()
    found = _Comparison(host, plan, tensors, others, known).run()
    return Compared(found.layers, found.unproved, time.perf_counter() - started)


class _Comparison:
    def __init__(self, host: Host, plan: WorkerPlan, tensors: Tensors, others: Tensors, known: Collection[str]) -> None:
        self.host, self.plan, self.tensors, self.others, self.known = host, plan, tensors, others, known
        self.layers = ({param.layer for param in plan.params} | plan.reload_only.keys()) - {*known}
        self.reads = Reads(plan)
        self.same: set[str] = set()
        self.unproved: dict[str, str] = {}
        self.wrong: dict[str, str] = {}  # the wrong attribute of each layer
        self.harmless: set[Kind] = set()
        self.stops: set[int] = set()
        self.live = dict(host.model.named_parameters(remove_duplicate=False))

    def run(self) -> Compared:
        try:
            fresh = self.host.fresh(0)
        except Exception as error:
            why = f"{self.host.software} makes no second model to compare it with: {type(error).__name__}: {error}"
            return Compared(unproved=dict.fromkeys(self.layers, why))
        if fresh is None:
            return Compared()
        self.stops = ids(self.host.model, fresh.model)
        again: list[Fresh] = []  # two more, made when something differs
        for unit in fresh.units():  # all, even after a difference: loads may be collective
            if all(layer in self.known for layer in unit.values()):
                continue
            try:
                self._compare(fresh, unit, again)
            except Exception as error:
                why = f"{self.host.software} could not load it a second time: {type(error).__name__}: {error}"
                self.unproved |= dict.fromkeys(unit.values(), why)
        if self.wrong:
            self._raise()
        missing = self.layers - self.same - self.unproved.keys()
        self.unproved |= dict.fromkeys(missing, f"a second model of {self.host.software} has no such layer")
        return Compared(frozenset(self.same - self.unproved.keys()), self.unproved)

    def _raise(self) -> None:
        layer, what = next(iter(self.wrong.items()))
        more = f", nor are {len(self.wrong) - 1} more layers" if len(self.wrong) > 1 else ""
        software = self.host.software
        text = f"{layer}: {what} is not what the initial load of {software} makes of the same weights{more}: its reload leaves another"
        raise ApplyError(text, tensor=layer, next_step=NEXT)

    def _compare(self, fresh: Fresh, unit: Mapping[str, str], again: list[Fresh]) -> None:
        """Compares the modules of one unit. unit: modules that are loaded together; the second
        model's names, each with that of the live model."""
        with fresh.loading(unit, self._wanted(unit, self.tensors)):
            found, hidden = differences(self.host.model, fresh.model, unit, self.stops)
            found = [one for one in found if one.kind not in self.harmless]
            hidden |= self._dropped(unit)
            computed = {name: self._computes(fresh, name, live) for name, live in unit.items() if live in hidden}
        if found:
            self._judge(found, unit, again)
        for name, same in computed.items():
            if same is not None and not same:
                self.wrong.setdefault(unit[name], COMPUTES)
        self.same |= set(unit.values())

    def _wanted(self, unit: Mapping[str, str], tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        return self.reads.offered(unit.values(), tensors)

    def _dropped(self, unit: Mapping[str, str]) -> set[str]:
        """Returns layers whose weights cannot be read, because the engine has left an empty tensor
        in their place."""
        names = set(unit.values())
        params = (param for param in self.plan.params if param.layer in names and not param.buffer)
        return {param.layer for param in params if prod(param.shape) and not self._numel(param.name)}

    def _numel(self, param: str) -> int:
        return self.live[param].numel() if param in self.live else 0

    def _computes(self, fresh: Fresh, name: str, live: str) -> bool | None:
        """Whether a layer whose state cannot be read gives the same output in both models. None,
        with a note, where it cannot run."""
        try:
            return alike(self.host.computes(live), fresh.computes(name))
        except Exception as error:
            self.unproved[live] = f"its weights are kept where they cannot be read, or be tried: {type(error).__name__}: {error}"
            return None

    def _judge(self, found: list[Difference], unit: Mapping[str, str], again: list[Fresh]) -> None:
        """Decides which differences are wrong: those that follow from weights, and those of
        parameters and buffers. Other state may have changed since the engine was started, such as
        counters. Uninitialized memory may hold anything."""
        if not again:
            again += [fresh for fill in (0xA5, 0) if (fresh := self.host.fresh(fill)) is not None]
        with again[0].loading(unit, self._wanted(unit, self.tensors)):
            anyhow = other_values(self.host.model, again[0].model, unit, found)
        with again[1].loading(unit, self._wanted(unit, self.others)):
            others = other_values(self.host.model, again[1].model, unit, found)
        for one, second, third in zip(found, anyhow, others, strict=True):
            if is_undetermined(one, second):
                continue
            if one.registered or not alike(one.fresh, third):
                self.wrong.setdefault(one.layer, one.way)
            else:
                self.harmless.add(one.kind)
