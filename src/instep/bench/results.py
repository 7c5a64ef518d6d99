"""Results of a run as plain data, and the numbers computed from them. Nothing here measures."""

from __future__ import annotations

from statistics import median
from typing import Literal

import msgspec

TrainerKind = Literal["plain", "fsdp2"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the numbers were measured. kind: "gpu" or "cpu". nbytes: of the model's
    tensors, each counted once."""

    kind: str
    shapes: str
    nbytes: int
    tensors: int
    repeats: int
    machine: list[str]
    versions: dict[str, str]
    date: str
    command: str
    trainer: TrainerKind = "plain"


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A raw rate of the machine on the way to one engine. seconds: of each transfer of one message
    of `nbytes`."""

    name: str
    engine: str
    nbytes: int
    seconds: list[float]

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / median(self.seconds)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to bring the trainer's weights into one engine.

    limit, rival: the names of the raw rate that bounds it and of the way that it is compared with.
    runs: seconds by phase of each timed run; `total` and `pause` are always there. cold: `total` of
    the first run of all.
    memory, cold_memory: bytes by place at the peak of a push, and of the first of all, beyond what
    was held before the way was set up.
    gap: the largest difference found between what the engine and the trainer compute, after a push
    of weights that the engine lacked.
    error: why there are no numbers.
    """

    way: str
    engine: str
    limit: str | None = None
    rival: str | None = None
    runs: list[dict[str, float]] = []
    cold: float | None = None
    memory: dict[str, int] = {}
    cold_memory: dict[str, int] = {}
    gap: float | None = None
    error: str | None = None

    @property
    def medians(self) -> dict[str, float]:
        """Median seconds by phase."""
        return {phase: median(run[phase] for run in self.runs) for phase in self.runs[0]} if self.runs else {}


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """One method to copy all regions of one plan. seconds: of each run."""

    method: str
    to: str
    regions: int
    nbytes: int
    seconds: list[float] = []
    error: str | None = None


class Results(msgspec.Struct, frozen=True, kw_only=True):
    setting: Setting
    limits: list[Limit]
    rows: list[Row]
    copies: list[Copy]
    calls: dict[str, dict[str, float]] = {}
    """Seconds of calls that move no weights, by engine (medians): one to a worker that does
    nothing, of which a push makes three, and those that pause the engine, its caches reset, and let
    it go on."""
    notes: list[str] = []
    """What a reader should know of this run: what could not be measured beside the rows and why,
    what has changed since."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one row in seconds. of_limit: its total divided by the time that the raw rate
    takes for the same bytes. rival_over_this: how many times longer the rival takes. Each is
    None if one of the two was not measured."""

    way: str
    engine: str
    medians: dict[str, float]
    of_limit: float | None
    rival_over_this: float | None


def summarize(results: Results) -> list[Summary]:
    """Returns one summary for each row, in order."""
    totals = {(row.engine, row.way): row.medians["total"] for row in results.rows if row.runs}
    return [_summary(row, totals, results) for row in results.rows]


def _summary(row: Row, totals: dict[tuple[str, str], float], results: Results) -> Summary:
    total = totals.get((row.engine, row.way))
    rate = rate_to(results.limits, row.limit, row.engine)
    rival = totals.get((row.engine, row.rival)) if row.rival else None
    return Summary(
        way=row.way,
        engine=row.engine,
        medians=row.medians,
        of_limit=total * rate / results.setting.nbytes if total and rate else None,
        rival_over_this=rival / total if total and rival else None,
    )


def rate_to(limits: list[Limit], name: str | None, engine: str) -> float | None:
    """Returns bytes per second of the largest message. Small ones may fit into a cache, or wait
    longer than they move."""
    found = [limit for limit in limits if limit.name == name and limit.engine == engine]
    return max(found, key=lambda limit: limit.nbytes).rate if found else None
