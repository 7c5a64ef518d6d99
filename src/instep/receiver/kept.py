"""What a worker has proved of its layers, kept for each list of tensors. The next trainer that
pushes tensors of the same names uses it too."""

from __future__ import annotations

from instep.protocol import WorkerPlan
from instep.receiver import Host
from instep.receiver.apply import Applier

LISTS = 4
"""How many lists of tensors are kept. Another dtype, or a part of the model, makes another list."""


class Kept:
    """The appliers of one worker, by the signatures of their tensors."""

    def __init__(self) -> None:
        self._appliers: dict[str, Applier] = {}

    def applier(self, host: Host, signature: str, plan: WorkerPlan) -> Applier:
        """Returns the applier that has proved something for these tensors, or a new one if the
        engine's plan or modules have changed."""
        known = self._appliers.pop(signature, None)
        if known is None or known.plan != plan or not known.stays():
            known = Applier(host, plan)
        self._appliers[signature] = known
        while len(self._appliers) > LISTS:
            del self._appliers[next(iter(self._appliers))]
        return known

    def known(self, signature: str) -> Applier | None:
        """Returns the applier that has proved something for these tensors, if it still holds."""
        known = self._appliers.get(signature)
        return known if known is not None and known.stays() else None

    def anew(self, applier: Applier) -> Applier:
        """Forgets what was proved, as after a commit that failed: the engine's own session repairs
        what copies would not."""
        fresh = Applier(applier.host, applier.plan)
        self._appliers = {signature: fresh if one is applier else one for signature, one in self._appliers.items()}
        return fresh
