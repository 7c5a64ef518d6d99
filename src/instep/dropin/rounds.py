"""A round: tensors that come one at a time, wait in host memory, and are committed as a whole (see `together.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from instep.dropin.communicator import sum_of
from instep.dropin.complete import known, lacking, listed, unread
from instep.dropin.peers import Peers
from instep.dropin.together import Stage, Together, as_instep
from instep.errors import DigestMismatch, InstepError, PlanError
from instep.protocol import TensorMeta, WorkerReceipt, dtype_name
from instep.receiver.state import Receiver

T = TypeVar("T")
logger = logging.getLogger("instep")


class Rounds:
    """One per worker. cast: whether tensors may be rounded to the dtype that the engine stores. A wider one is always taken.

    All workers of an engine get the same calls, and so have the same number of a round.
    """

    def __init__(self, receiver: Receiver, peers: Peers, *, cast: bool) -> None:
        self.receiver, self.peers = receiver, peers
        self.together = Together(receiver, peers, cast=cast)
        self.receipt: WorkerReceipt | None = None
        self.number = 0
        self.begin()

    def begin(self) -> None:
        """Forgets what came without being committed."""
        self.number += 1
        self.stage = Stage(self.number)
        self.names: set[str] = set()
        self.fault: InstepError | None = None
        self.told = False
        self.arrived = self.look_at = 0
        self.peers.forget(self.number)

    def add(
        self, name: str, bring: Callable[[], torch.Tensor], *, last: bool | None = False, digest: int | None = None
    ) -> WorkerReceipt | None:
        """One tensor, which the round keeps. The receipt where the round ended with it.

        last: whether it ends the round; None where that is to be seen from whether the engine has all that it needs.
        digest: what the tensor's must be.

        A name that comes a second time begins the next round. Raises `PlanError` where the one before, which was to end by itself, was left
        incomplete; and once anything was wrong with a round whatever that was, until its end.
        """
        left = self._left_behind(name, ends=last is not None) if name in self.names else None
        self.names.add(name)
        self._try(lambda: self._keep(name, bring(), digest))
        if last or (last is None and self._try(self._complete)):
            return self.finish()
        if self.fault is not None or left is not None:
            raise self.fault or left  # type: ignore[misc]
        return None

    def finish(self, version: str | None = None) -> WorkerReceipt:
        """Commits what has come, in every worker of the engine: all of them must be told to. Where nothing came since the last commit
        its receipt is given once more.

        Raises what `Together.commit` raises, or what was wrong with the round before.
        """
        if not self.names and self.receipt is not None and version is None:
            return self.receipt
        try:
            if self.fault is not None:
                raise self.fault
            self.receipt = self.together.commit(self.stage, version or f"round-{self.number}")
            return self.receipt
        except InstepError as error:
            logger.error("round %d: %s", self.number, error)
            raise
        finally:
            self.begin()

    def drop(self, error: Exception) -> None:
        """Ends the round without a commit, in every worker."""
        self._fail(error)
        self.begin()

    def _try(self, action: Callable[[], T]) -> T | None:
        """Where it fails, the round will not be committed, in no worker."""
        try:
            return action()
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        if self.fault is None:
            self.fault = as_instep(error)
            self.peers.tell(f"{self.number} failed", self.fault)
            self.stage.clear()

    def _left_behind(self, name: str, ends: bool) -> PlanError | None:
        """Begins a round with a name that came already. The error, unless the trainer has heard of one in the round before. ends: the
        trainer says when a round ends, and hears then what is missing."""
        heard, count = ends or self.told or self.fault is not None, len(self.names)
        missing = (
            None
            if heard
            else self._try(lambda: sorted(self.together.last.keys() - self.names) or lacking([self.together.look(self.stage)]))
        )
        self.begin()
        self.told = True
        if heard:
            logger.warning("%s came a second time: the %d tensors before it are dropped, and it begins another round", name, count)
            return None
        return PlanError(
            f"{name} came a second time before its round was complete: {listed(missing or ['the rest'])} did not come. The {count} tensors "
            f"of that round are dropped, the engine still serves {self.receiver.version or 'its first weights'}, and {name} begins another",
            tensor=name,
        )

    def _keep(self, name: str, tensor: torch.Tensor, digest: int | None) -> None:
        if self.fault is not None:
            return
        meta = TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        found = sum_of(tensor, meta)
        if digest is not None and found != digest:
            raise DigestMismatch.of(name, found, digest)
        self.stage.metas[name], self.stage.digests[name], self.stage.tensors[name] = meta, found, tensor.cpu()
        self.arrived += meta.numel

    def _complete(self) -> bool:
        """Whether all has come that the engine needs, as its workers see it together. A tensor brings no more elements than it has: so
        the next look is due when as many have come as are missing."""
        before = self.together.last
        if self.fault is not None or self.names <= before.keys():
            return self.names == before.keys()
        if self.arrived < self.look_at:
            return False
        plan = self.together.look(self.stage)
        if plan.reload_only:
            layer, reason = next(iter(plan.reload_only.items()))
            raise PlanError(f"it cannot be seen when {layer} has all that it needs ({reason}): call finish_update() after the last tensor")
        plans = self.together.exchange(self.stage, "look", plan)
        extra = unread(self.names, plans)
        if len(extra) == len(self.names) and all(known(self.stage.metas[name], self.stage.tensors[name], before) for name in extra):
            self.begin()  # it belongs to the round before: a tied head at the end of a state dict
            return False
        missing = max(sum(lacking([plan]).values()) for plan in plans)
        self.look_at = self.arrived + missing
        return missing == 0
