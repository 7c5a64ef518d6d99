"""What a worker has proved of its layers, kept for each list of tensors: also for the next trainer that pushes one of the same names."""

from __future__ import annotations

from instep.protocol import WorkerPlan
from instep.receiver import Host
from instep.receiver.apply import Applier

LISTS = 4
"""Of tensors, the last ones that were pushed: a trainer in another dtype, or of a part of the model, has one of its own."""


class Kept:
    """The appliers of one worker, by the signatures of their tensors."""

    def __init__(self) -> None:
        self._appliers: dict[str, Applier] = {}

    def applier(self, host: Host, signature: str, plan: WorkerPlan) -> Applier:
        """The one that has proved something, where the engine has neither another plan nor other modules by now."""
        known = self._appliers.pop(signature, None)
        if known is None or known.plan != plan or not known.stays():
            known = Applier(host, plan)
        self._appliers[signature] = known
        while len(self._appliers) > LISTS:
            del self._appliers[next(iter(self._appliers))]
        return known

    def anew(self, applier: Applier) -> Applier:
        """Forgets what was proved, as after a commit that failed: the engine's own session puts right what copies would not."""
        fresh = Applier(applier.host, applier.plan)
        self._appliers = {signature: fresh if one is applier else one for signature, one in self._appliers.items()}
        return fresh
