"""Measures one way to bring weights into one engine: warm-ups, timed runs, and the proof that
the engine has the weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

from instep.bench import memory
from instep.bench.results import Row
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.bench.waits import Late, bounded
from instep.errors import InstepError

Push = Callable[[], dict[str, float]]
"""Brings the trainer's weights in. The seconds of its phases: at least `pause`; `total` where it is
not the whole call."""
WARM_UPS = 3
AFTER_A_FAILURE = 10.0
"""Seconds to take down a way that has failed."""
BOUND = 0.5
"""Largest accepted difference of two log-probabilities (natural log) in bfloat16; other weights are
several apart."""


@dataclass(frozen=True)
class Way:
    """A way to bring weights in. open: sets up what is made once, and yields the push. limit,
    rival: see `results.Row`."""

    name: str
    open: Callable[[Trainer, Subject], AbstractContextManager[Push]]
    limit: str
    rival: str | None = None


class NotProved(Exception):
    """The engine does not have the trainer's weights, or this cannot be decided."""


@dataclass
class Bench:
    """One engine and its trainer. mark: the engine's mark with the trainer's first weights, from
    the first way that was proved."""

    trainer: Trainer
    subject: Subject
    repeats: int
    mark: tuple[str, Hashable] | None = None
    lost: str | None = None

    def measure(self, way: Way) -> Row:
        """Measures a way. Any error becomes the row's error."""
        try:
            if self.lost:
                raise Late(f"the engine was lost: {self.lost}")
            return self._measure(way)
        except Exception as error:
            if isinstance(error, Late):
                self.lost = self.lost or f"{way.name}: {error}"
            return failed(way, self.subject.name, error)

    def _measure(self, way: Way) -> Row:
        self.trim()
        pids = [self.subject.call("pid"), os.getpid()]
        base = memory.held(pids)
        with _opened(way, self.trainer, self.subject) as push:
            with memory.peak(pids, base) as first:
                cold = self.timed(push)["total"]
            for _ in range(WARM_UPS - 1):
                self.timed(push)
            runs = [self.timed(push) for _ in range(self.repeats)]
            if self.trainer.steps % 2 == 0:
                self.timed(push)  # so that the next step brings the first weights back, whose mark is known
            self.trim()
            self.step()
            stale, _ = self.look()
            with memory.peak(pids, base) as steady:
                bounded("a push", push)
            gap = self.judge(way, stale, *self.look())
        return Row(
            way=way.name, engine=self.subject.name, limit=way.limit, rival=way.rival, runs=runs, cold=cold, gap=gap,
            memory=steady, cold_memory=first,
        )  # fmt: skip

    def timed(self, push: Push) -> dict[str, float]:
        self.step()
        started = time.perf_counter()
        phases = bounded("a push", push)
        return {"total": time.perf_counter() - started, **phases}

    def step(self) -> None:
        bounded("the trainer's step", self.trainer.step)

    def trim(self) -> None:
        bounded("the trainer's GPU", memory.trim)
        bounded("the engine's worker", lambda: self.subject.call("trim"))

    def look(self) -> tuple[float, Hashable]:
        return bounded("a look at the engine", lambda: self.subject.look(self.trainer))

    def judge(self, way: Way, stale: float, gap: float, mark: Hashable) -> float:
        """Returns the gap after a push, if it proves that the push worked. stale: the gap before
        it. Raises `NotProved`."""
        if stale <= BOUND:
            raise NotProved(f"the engine computed the same with the weights before (differences up to {stale:.3g}): nothing can be told")
        if not gap <= BOUND:
            raise NotProved(f"after a push the engine does not compute what the trainer computes: differences up to {gap:.3g}")
        known, self.mark = self.mark, self.mark or (way.name, mark)
        if known is not None and known[1] != mark:
            raise NotProved(f"after a push the engine is not what {known[0]} made of it with the same weights")
        return gap


def failed(way: Way, engine: str, error: Exception) -> Row:
    text = str(error.args[0]) if isinstance(error, InstepError) else str(error)
    return Row(way=way.name, engine=engine, limit=way.limit, rival=way.rival, error=f"{type(error).__name__}: {text}")


@contextmanager
def _opened(way: Way, trainer: Trainer, subject: Subject) -> Iterator[Push]:
    context = way.open(trainer, subject)
    push = bounded("the set-up", context.__enter__)
    try:
        yield push
    except BaseException:
        with suppress(Exception):  # the first error is the one to tell; what hangs is not waited for as long again
            bounded("the end", lambda: context.__exit__(None, None, None), AFTER_A_FAILURE)
        raise
    bounded("the end", lambda: context.__exit__(None, None, None))
