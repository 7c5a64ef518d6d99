"""What a push tells while it runs: one `Event` at a time, to any function that takes one.

sync = WeightSync(model, [llm], sinks=[progress_bar(), prometheus()])
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from instep.errors import InstepError
from instep.receipt import Receipt

logger = logging.getLogger("instep")


@dataclass(frozen=True, slots=True)
class Event:
    """`phase` has begun; `nbytes` of `total` bytes are published; or the push has ended with a receipt or an error."""

    kind: Literal["phase", "bytes", "done", "failed"]
    version: str
    phase: str = ""
    nbytes: int = 0
    total: int = 0
    receipt: Receipt | None = None
    error: InstepError | None = None


Sink = Callable[[Event], None]


def log(event: Event) -> None:
    """The sink that is always on: receipts at INFO, failures at WARNING, through the standard `instep` logger."""
    if event.receipt is not None:
        logger.info("%s", event.receipt)
    elif event.error is not None:
        logger.warning("push of %s failed: %s", event.version, event.error)


def prometheus(registry: Any = None) -> Sink:
    """Counters and histograms in `registry` (default: prometheus_client's own). Needs `prometheus_client`."""
    from prometheus_client import REGISTRY, Counter, Histogram

    registry = registry or REGISTRY
    duration = Histogram("instep_sync_duration_seconds", "Duration of each phase of a push", ["phase"], registry=registry)
    pause = Histogram("instep_pause_seconds", "Time an engine did not generate during a push", ["engine"], registry=registry)
    nbytes = Counter("instep_sync_bytes", "Bytes published to engines", registry=registry)
    syncs = Counter("instep_syncs", "Pushes by outcome: ok, partial, or the error's name", ["outcome"], registry=registry)
    mismatches = Counter("instep_digest_mismatches", "Pushes that ended because bytes were not the trainer's", registry=registry)

    def sink(event: Event) -> None:
        if event.receipt is not None:
            for phase, seconds in event.receipt.seconds.items():
                duration.labels(phase).observe(seconds)
            for engine in event.receipt.engines:
                pause.labels(engine.engine).observe(engine.pause)
            nbytes.inc(event.receipt.nbytes)
            syncs.labels("partial" if event.receipt.failed else "ok").inc()
        elif event.error is not None:
            syncs.labels(type(event.error).__name__).inc()
            if type(event.error).__name__ == "DigestMismatch":
                mismatches.inc()

    return sink


def progress_bar() -> Sink:
    """A bar on standard error while bytes are published, on a terminal only. Needs `rich`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

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
