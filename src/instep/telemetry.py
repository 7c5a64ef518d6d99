"""Events of a push while it runs. Any function that takes an `Event` can be a sink.

sync = WeightSync(model, [llm], sinks=[progress_bar(), prometheus()])
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from instep.errors import InstepError
from instep.extras import needed_by
from instep.metrics import Lag, metrics
from instep.receipt import Receipt

logger = logging.getLogger("instep")


@dataclass(frozen=True, slots=True)
class Event:
    """`phase` has begun; `nbytes` of `total` bytes are published; or the push has ended with a
    receipt or an error."""

    kind: Literal["phase", "bytes", "done", "failed"]
    version: str
    phase: str = ""
    nbytes: int = 0
    total: int = 0
    receipt: Receipt | None = None
    error: InstepError | None = None


Sink = Callable[[Event], None]


class Account:
    """Sends the events of a push to its sinks, and keeps the time of each step."""

    def __init__(self, version: str, sinks: Sequence[Sink]) -> None:
        self.version, self.sinks = version, sinks
        self.seconds: dict[str, float] = {}

    def tell(self, event: Event) -> None:
        for sink in self.sinks:
            try:
                sink(event)
            except Exception:  # who listens to a push must not end it half way
                logger.exception("a sink failed at %s of %s", event.kind, self.version)

    def progress(self, total: int) -> Callable[[int], None]:
        """Returns a function that takes how many bytes more were read, of `total`. It tells sinks
        of every hundredth."""
        nbytes = told = 0

        def read(more: int) -> None:
            nonlocal nbytes, told
            nbytes += more
            if nbytes == total or nbytes - told >= total / 100:
                self.tell(Event("bytes", self.version, "publish", nbytes, total))
                told = nbytes

        return read

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.tell(Event("phase", self.version, name))
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def log(event: Event) -> None:
    """Logs each push. This sink is always on: receipts at INFO, failures at WARNING, through the
    `instep` logger.

    A failure is raised too. Where logging is not configured only whoever catches it tells it:
    Python would print it a second time.
    """
    if event.receipt is not None:
        logger.info("%s", event.receipt)
    elif event.error is not None and logger.hasHandlers():
        logger.warning("push of %s failed: %s", event.version, event.error)


def prometheus(registry: Any = None) -> Sink:
    """Makes a sink for the metrics of docs/metrics.md in `registry` (default:
    prometheus_client's own). Needs the extra `metrics`."""
    counted, lags = metrics(registry), defaultdict[str, Lag](Lag)

    def behind(engine: str, version: str, served: bool) -> None:
        (lags[engine].serve if served else lags[engine].begin)(version)
        counted.lag.labels(engine).set(len(lags[engine]))

    def sink(event: Event) -> None:
        receipt, error = event.receipt, event.error
        if receipt is not None:
            for phase, seconds in receipt.seconds.items():
                counted.seconds.labels(phase).observe(seconds)
            for engine in receipt.engines:
                counted.pause.labels(engine.engine).observe(engine.pause)
                counted.bytes.labels(receipt.transport).inc(receipt.nbytes)
                behind(engine.engine, event.version, served=True)
            for state in receipt.failed:
                behind(state.engine, event.version, served=False)
            counted.ended("partial" if receipt.failed else "ok")
        elif error is not None:
            reached = {state.engine: state.serving == "new" for state in getattr(error, "engines", ())}
            for name in lags.keys() | reached.keys():
                behind(name, event.version, served=reached.get(name, False))
            counted.ended(type(error).__name__)

    return sink


def scalars(event: Event) -> dict[str, float]:
    """Returns the numbers of a push that has ended, for any logger of scalars; an empty dict for
    another event.

    Names: `instep/seconds/PHASE`, `instep/pause` (seconds), `instep/bytes`, `instep/engines`,
    `instep/failed`, `instep/canary_gap`.
    """
    receipt = event.receipt
    if receipt is None:
        return {"instep/failed": 1.0} if event.error is not None else {}
    found = {f"instep/seconds/{phase}": seconds for phase, seconds in receipt.seconds.items()}
    found |= {"instep/pause": receipt.pause, "instep/bytes": float(receipt.nbytes)}
    found |= {"instep/engines": float(len(receipt.engines)), "instep/failed": float(len(receipt.failed))}
    return found if receipt.canary_gap is None else found | {"instep/canary_gap": receipt.canary_gap}


def progress_bar() -> Sink:
    """Makes a sink that draws a bar on standard error while bytes are published, on a terminal
    only.

    Raises `MissingExtra` without the extra `cli`.
    """
    with needed_by("progress_bar()"):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.disable = not bar.console.is_terminal
    task = bar.add_task("", total=None, visible=False)

    def sink(event: Event) -> None:
        if event.kind in ("done", "failed"):
            bar.stop()
            bar.update(task, visible=False)
            return
        bar.start()
        text = f"{event.version} {event.phase}" if event.kind == "phase" else None
        bar.update(task, description=text, completed=event.nbytes, total=event.total or None, visible=True)

    return sink
