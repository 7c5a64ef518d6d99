"""A round: tensors that come one at a time, wait in host memory, and are committed as a whole (see
`together.py`).

Where a trainer does not say where its updates end, that is seen: by what the engine needs, by the
order of earlier updates (`order.py`), by a name that comes again, at the latest when the engine
begins with a new request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import TypeVar

import torch

from instep.dropin.communicator import sum_of
from instep.dropin.complete import lacking, listed, of_no_use, places, unread
from instep.dropin.order import Order, before_the_first
from instep.dropin.round import Round
from instep.dropin.together import ALL_ONCE, First, Stage, Together
from instep.engine.vllm.peers import Peers, as_instep
from instep.errors import DigestMismatch, InstepError, PlanError
from instep.protocol import TensorMeta, WorkerReceipt, dtype_name
from instep.receiver.state import Receiver

T = TypeVar("T")
logger = logging.getLogger("instep")


class Rounds:
    """One per worker. cast: whether tensors may be rounded to the dtype that the engine stores. A
    wider one is always taken.

    All workers of an engine get the same calls, and so have the same number of a round.
    """

    def __init__(self, receiver: Receiver, peers: Peers, *, cast: bool) -> None:
        self.receiver, self.peers = receiver, peers
        self.together = Together(receiver, peers, cast=cast)
        self.first: First | None = None
        """Brings the weights that the engine was loaded with."""
        self.receipt: WorkerReceipt | None = None
        self.order = Order()
        self.changed = False
        """Whether the last update was committed, and has other tensors than the one before."""
        self.begin()

    def begin(self) -> None:
        """Forgets what came without being committed."""
        self.number = self.peers.begin()
        self.now = Round(Stage(self.number))

    def add(
        self, name: str, bring: Callable[[], torch.Tensor], *, last: bool | None = False, digest: int | None = None
    ) -> WorkerReceipt | None:
        """One tensor, which the round keeps. The receipt where the round ended with it.

        last: whether it ends the round; None where the trainer does not say that. digest: what the
        tensor's must be.

        A name that comes a second time begins the next round. Raises `PlanError` where the one
        before, which was to end by itself, was left incomplete; and once anything was wrong with a
        round whatever that was, until its end.
        """
        if self.now.fault is not None and self.order.full[:1] == (name,):
            self.begin()  # of an update that failed the trainer has heard
        left = self._begun(name, says=last is not None) if name in self.now.names or self.now.whole else None
        self.now.says = last is not None
        self.now.names.append(name)
        self._try(lambda: self._keep(name, bring(), digest))
        receipt = self.finish() if last else self._end_seen() if last is None else None
        if receipt is None and (self.now.fault is not None or left is not None):
            raise self.now.fault or left  # type: ignore[misc]
        return receipt

    def finish(self, version: str | None = None) -> WorkerReceipt:
        """Commits what has come, when every worker is told to. If nothing has come since the last
        commit, returns its receipt again.

        Raises what `Together.commit` raises, or what was wrong with the round before.
        """
        if not self.now.names and self.receipt is not None and version is None:
            return self.receipt
        alone = not self.now.says and self._alone()
        return self._commit_alone(len(self.now.names), version) if alone else self._commit(version or f"round-{self.number}")

    def settle(self) -> None:
        """Commits what came of a trainer that does not say where its updates end, unless more of an
        update of all weights is to come. Called before the engine begins with new requests. What
        goes wrong is logged, and the engine serves what it served.
        """
        over = self.now.whole or (self._alone() and not self.order.goes_on(self.now.names))
        if over and not (self.now.says or self.now.fault or self.now.doubtful):
            with suppress(InstepError):
                self.finish()

    def settle_alone(self) -> None:
        """Does what `settle` does, for a caller who knows that nothing more is to come, also before
        an update of all weights has come.

        Raises `PlanError` for what cannot be put with the weights that the engine serves.
        """
        self.settle()
        if self.now.doubtful or self.now.unseen:
            self.finish()
        elif self.now.names and not self.now.says and not self.order.full and self.now.fault is None:
            label = f"round-{self.number} ({listed(self.now.names)} alone)"
            self._try(lambda: self.together.complete(self.now.stage, self.first))
            self._commit(label, alone=True)

    def check(self) -> None:
        """Raises `PlanError` where the engine's loader refuses what has come so far."""
        self._try(lambda: self.together.look(self.now.stage))
        if self.now.fault is not None:
            raise self.now.fault

    def drop(self, error: Exception) -> None:
        """Ends the round without a commit, in every worker."""
        self._fail(error)
        self.begin()

    def fail_too(self, error: InstepError) -> None:
        """Goes the way of another worker, which has failed in a call that has gone well here."""
        if self.now.names:
            self._fail(error)

    def heard(self) -> None:
        """The trainer has heard of an error since the last name: it may begin anew."""
        self.now.told = len(self.now.names)

    def leave(self) -> None:
        """Forgets what a trainer left, and its order: another one comes."""
        self.begin()
        self.order = Order()

    def _alone(self) -> bool:
        """Whether what came are some weights, to be put with those that the engine serves."""
        return not self.now.whole and bool(self.order.full) and self.order.alone(self.now.names) == len(self.now.names) > 0

    def _commit(self, version: str, *, alone: bool = False) -> WorkerReceipt:
        names, before, self.changed = self.now.names, self.together.last, False
        try:
            if self.now.fault is not None:
                raise self.now.fault
            self.receipt = self.together.commit(self.now.stage, version)
            self.changed = self.together.last != before
        except InstepError as error:
            logger.error("round %d: %s", self.number, error)
            raise
        finally:
            self.begin()
        self.order.committed(names, alone=alone)
        return self.receipt

    def _commit_alone(self, count: int, version: str | None = None) -> WorkerReceipt:
        """Commits the first `count` weights of those that came, under a label that names them."""
        stage, rest = self.now.stage, self.now.names[count:]
        self.now.names = self.now.names[:count]
        self.now.stage = stage.only(self.now.names, self.number)
        self._try(lambda: self.together.complete(self.now.stage))
        try:
            return self._commit(version or f"round-{self.number} ({listed(self.now.names)} alone)", alone=True)
        finally:
            self._go_on(stage, rest)

    def _go_on(self, stage: Stage, names: list[str]) -> None:
        """The round that has begun holds these tensors of a stage."""
        self.now.stage, self.now.names, self.now.says = stage.only(names, self.number), names, False
        self.now.arrived = sum(meta.numel for meta in self.now.stage.metas.values())

    def _try(self, action: Callable[[], T]) -> T | None:
        """Where it fails, the round will not be committed, in no worker."""
        try:
            return action()
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        self.changed = False
        if self.now.fault is None:
            self.now.fault = as_instep(error)
            self.peers.fail(error)
            self.now.stage.clear()

    def _begun(self, name: str, *, says: bool) -> InstepError | None:
        """Begins a round with a name that came already, or that comes when all have. What went
        wrong with the one before."""
        if says or self.now.says or self.now.fault is not None:
            return self._left_behind(name, ends=says)
        try:
            if self.order.next(self.now.names) == name:  # some weights came alone, then an update of all began
                self._commit_alone(self.order.alone(self.now.names))
            elif self.now.doubtful:
                return self._left_in_doubt(name)
            elif self.now.whole or self.now.unseen or self._alone():
                self.finish()
            elif not self.order.full and name in self.now.names[: (before := self._before_the_first())]:
                return self._drop_first(before)
            else:
                return self._left_behind(name, ends=False)
        except InstepError as error:
            return error
        return None

    def _before_the_first(self) -> int:
        look = self.together.look(self.now.stage)
        return before_the_first(self.now.names, places(self.together.exchange(self.now.stage, "order", look)))

    def _drop_first(self, count: int) -> PlanError:
        """Of a round without an update of all weights before it: the first names came alone, and an
        update has begun behind them."""
        stage, alone, rest = self.now.stage, self.now.names[:count], self.now.names[count:]
        self.begin()
        self._go_on(stage, rest)
        self.now.told = len(rest) + 1
        return PlanError(
            f"{listed(alone)} came alone before any update of all weights, and was dropped; the update that began behind it goes on",
            next_step="nothing is lost but what came alone: send it again after this update",
        )

    def _left_in_doubt(self, name: str) -> PlanError:
        """Begins a round with a name that shows nothing about those before it."""
        first, count = listed(self.now.doubtful), len(self.now.names)
        self.begin()
        self.now.told = 1
        return PlanError(
            f"no update of all weights has come before, and it cannot be told whether {first} came alone "
            f"or began the update that followed: these {count} tensors are dropped",
            next_step=f"call finish_update(), which drops {name} too and says so; then send all weights, and call finish_update() after "
            "the last of them: later updates end by themselves",
        )

    def _left_behind(self, name: str, ends: bool) -> PlanError | None:
        """Begins a round with a name that came already. The error, unless the trainer has heard of
        one and sent nothing since. ends: the trainer says when a round ends, and hears then what is
        missing."""
        count = len(self.now.names)
        heard = ends or self.now.told == count or self.now.fault is not None
        absent = self.together.last.keys() - set(self.now.names)
        missing = None if heard else self._try(lambda: absent or lacking([self.together.look(self.now.stage)]))
        self.begin()
        if heard:
            logger.warning("%s came a second time: the %d tensors before it are dropped, and it begins another round", name, count)
            return None
        self.now.told = 1
        return PlanError(
            f"{name} came a second time before its round was complete: {listed(missing or ['the rest'])} did not come. The {count} tensors "
            f"of that round are dropped, the engine still serves {self.receiver.version or 'its first weights'}, and {name} begins another",
            tensor=name,
            next_step=ALL_ONCE,
        )

    def _keep(self, name: str, tensor: torch.Tensor, digest: int | None) -> None:
        if self.now.fault is not None:
            return
        meta = TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        found = sum_of(tensor, meta)
        if digest is not None and found != digest:
            raise DigestMismatch.of(name, found, digest)
        self.now.stage.metas[name], self.now.stage.digests[name], self.now.stage.tensors[name] = meta, found, tensor.cpu()
        self.now.arrived += meta.numel

    def _end_seen(self) -> WorkerReceipt | None:
        """Commits the round where it is seen to be at its end."""
        if self.now.fault is not None or self.order.goes_on(self.now.names):
            return None
        if tuple(self.now.names) == self.order.part:
            return self._commit_alone(len(self.now.names))
        if not self._try(self._complete):
            return None
        self.now.whole = bool(self.now.doubtful) or self.order.next(self.now.names) is not None
        return None if self.now.whole else self.finish()

    def _complete(self) -> bool:
        """Whether all has come that the engine needs, as its workers see it together. A tensor
        brings no more elements than it has: so the next look is due when as many have come as are
        missing."""
        if self.now.names and set(self.now.names) == set(self.order.full):
            return True
        if self.now.arrived < self.now.look_at:
            return False
        plans = self.together.exchange(self.now.stage, "look", self.together.look(self.now.stage))
        stray = unread(self.now.names, plans)
        held, last = self.now.stage, self.together.last
        if stray == self.now.names and self.order.full and all(of_no_use(held.metas[name], held.tensors[name], last) for name in stray):
            self.begin()  # it came after the end of the round before: a tied head at the end of a state dict
            return False
        missing = max(sum(lacking([plan]).values()) for plan in plans)
        computed = {layer: reason for plan in plans for layer, reason in plan.reload_only.items()}
        self.now.look_at = self.now.arrived + missing if missing or not computed else inf
        if missing == 0 and not self.order.full:
            self.now.doubtful = self.now.names[: before_the_first(self.now.names, places(plans))]
            self.now.unseen = bool(computed)
            if computed:
                logger.warning("this update ends when the next begins, or with finish_update(): the loader computes %s", listed(computed))
        return missing == 0 and not computed
