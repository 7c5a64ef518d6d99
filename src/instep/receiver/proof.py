"""What a worker has summed up of a version's bytes, to compare with the trainer's sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from instep.errors import ApplyError
from instep.plan.sums import Told, add_up
from instep.receiver.apply import Applier
from instep.receiver.copies import Copies
from instep.receiver.pull import Parts


@dataclass(frozen=True, slots=True)
class Proof:
    """tensors: how many were proved. complete: whether nothing is left to prove. wholes, parts,
    theirs: see `protocol.WorkerReceipt`."""

    tensors: int
    complete: bool = False
    wholes: dict[str, int] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    theirs: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, wholes: dict[str, int], some: Sequence[Parts], theirs: dict[str, int], wanted: Collection[str]) -> Proof:
        """Makes a proof of sums that are still to be compared. some: sums of regions, by different
        layers.

        wanted: tensors that this worker reads. Raises `ApplyError` for a wanted tensor of which
        nothing was summed up.
        """
        parts: Parts = dict(some[0])
        for name, sums in chain.from_iterable(one.items() for one in some[1:]):
            parts[name] = parts.get(name, {}) | sums
        if untold := sorted(name for name in wanted if name not in parts and name not in wholes):
            raise ApplyError(f"nothing was summed up of {untold[0]}", tensor=untold[0])
        return cls(len(parts.keys() | wholes.keys()), wholes=wholes, parts=parts, theirs=theirs)

    def proves(self, theirs: Mapping[str, int] | None) -> bool:
        """Whether this worker holds the trainer's bytes. theirs: the trainer's sums, where they are
        known."""
        return self.complete or add_up([Told(self.wholes, self.parts)], self.theirs or theirs or {})

    def sums(self) -> dict[str, Any]:
        return {"wholes": self.wholes, "parts": self.parts, "theirs": self.theirs}


def check_places(copies: Copies, applier: Applier) -> None:
    """Raises `ApplyError` where a layer that was written directly has moved, as it may in a reload
    session."""
    if applier.reloaded and not copies.stay(applier.host.model):
        raise ApplyError("the engine's reload session moved weights that had been pulled already")
