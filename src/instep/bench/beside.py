"""Compares a push with the fastest of vLLM's own ways in the same run.

The overview of `docs/benchmarks.md` and its picture show these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from instep.bench.results import Results, rate_to

OURS, THEIRS = "instep ", "vLLM"


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """A push and vLLM's fastest way into one engine. Seconds are medians.

    push, theirs: end to end. limit: a plain copy of the same bytes, where that was measured.
    """

    shapes: str
    nbytes: int
    engine: str
    way: str
    push: float
    pause: float
    rival: str
    theirs: float
    limit: float | None

    @property
    def times(self) -> float:
        """How many times longer vLLM's way takes."""
        return self.theirs / self.push


def beside(results: Results) -> Iterator[Beside]:
    """Yields one comparison for each engine into which both bring the weights."""
    setting = results.setting
    for engine in dict.fromkeys(row.engine for row in results.rows):
        rows = sorted(
            (row for row in results.rows if row.engine == engine and row.runs),
            key=lambda row: row.medians["total"],
        )
        ours = next((row for row in rows if row.way.startswith(OURS)), None)
        theirs = next((row for row in rows if THEIRS in row.way and not row.way.startswith(OURS)), None)
        if ours and theirs:
            rate = rate_to(results.limits, ours.limit, engine)
            yield Beside(
                shapes=setting.shapes,
                nbytes=setting.nbytes,
                engine=engine,
                way=ours.way,
                push=ours.medians["total"],
                pause=ours.medians["pause"],
                rival=theirs.way,
                theirs=theirs.medians["total"],
                limit=setting.nbytes / rate if rate else None,
            )
