"""Writes `docs/benchmarks.md` and its picture from kept results.

    python -m instep.bench.page RESULTS DOCS

Numbers stand in no other text, so that text and results cannot differ.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from instep.bench.beside import beside
from instep.bench.kept import Generation, Kept, Pushes, Sharded, read
from instep.bench.picture import picture
from instep.bench.report import head, size, table, tables, time
from instep.bench.results import Results

PICTURED = ("gpu-qwen3-8b", "gpu-qwen3-moe")
"""Results in the picture: the newest of each model that were measured on two GPUs."""

TEXT = """\
# Benchmarks

<!-- Written by `make benchmarks` from bench/results. A test compares the two. -->

Each section is one run of one command and names its card or processor, its versions and its date.
A time is the median of the timed pushes that come after the warm-up.
Compare rows of one section: machines of one kind differ, and so do runs on one machine.

A way is listed only if the engine computes what the trainer computes afterwards
([how that is checked](design/benchmark.md)). A push compares digests of all bytes on both sides and
resets the engine's prefix cache within its time; vLLM's own transfers do neither.
Two ways bring nothing from one process to another: `reload in memory` is vLLM's reload session over
tensors that its worker has already, and `digest alone` copies nothing.

## A push beside vLLM's fastest way

![Bars: a push beside vLLM's fastest own way](push.svg)

"""

OVERVIEW = (
    *("results", "trainer", "engine on", "push", "paused", "a plain copy"),
    *("vLLM's fastest", "takes", "rival / push"),
)
COLUMNS = """\

| column | says |
|---|---|
| push | end to end, from the call of `push` to its return |
| paused | how long the engine generates nothing |
| a plain copy, limit | the same bytes at the raw rate of the machine, measured in the same run |
| rival / push | how many times longer the way takes that this one is compared with |
| first push | it also traces the loader and finds which layers can be copied directly |
| extra memory | at the peak of a push, beyond what was held before |

"""


def page(kept: Mapping[str, Kept]) -> str:
    """Returns the Markdown of all results, by their names."""
    sections = (f"## {name}\n\n{section(results)}\n" for name, results in kept.items())
    text = TEXT + table(
        OVERVIEW,
        (
            row
            for name, results in kept.items()
            if isinstance(results, Results)
            for row in _beside(name, results)
        ),
    ) + "\n" + COLUMNS + "\n".join(sections)  # fmt: skip
    return wrapped(text)


def wrapped(text: str) -> str:
    """Returns Markdown with lines of at most 100 columns. Tables stay."""
    wrap = partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if line.startswith("|") else wrap(line) for line in text.split("\n"))


def _beside(name: str, results: Results) -> Iterator[Sequence[str]]:
    for row in beside(results):
        limit = "–" if row.limit is None else time(row.limit)
        pair = (
            time(row.push),
            time(row.pause),
            limit,
            row.rival,
            time(row.theirs),
            f"{row.times:.1f}",
        )
        yield f"[{name}](#{name.replace('.', '')})", results.setting.trainer, row.engine, *pair


def section(results: Kept) -> str:
    """Returns the Markdown of one file of results."""
    match results:
        case Results():
            return tables(results)
        case Sharded():
            body = _sharded(results)
        case Pushes():
            body = _pushes(results)
        case Generation():
            body = _generation(results)
    return f"{head(results.setting)}\n\n{body}"


def _sharded(results: Sharded) -> str:
    """Times are those of rank 0. The other ranks give their bytes to rank 0 or write them into the
    shared segment."""
    return f"Medians of {results.setting.repeats}:\n\n" + table(
        ("ranks", "way", "push", "given by other ranks", "read by all workers", "private memory"),
        (
            (
                *(number, way, time(median(first.seconds))),
                *(size(sum(rank[way].given for rank in ranks[1:])), size(first.read)),
                ", ".join(size(rank[way].private) for rank in ranks),
            )
            for number, ranks in results.ranks.items()
            for way, first in ranks[0].items()
        ),
    )  # fmt: skip


def _pushes(results: Pushes) -> str:
    return f"Pushes in a row over {results.way}:\n\n" + table(
        (
            "push",
            "end to end",
            "paused",
            "of it in the worker's copy",
            "GPU memory kept afterwards",
        ),
        (
            (
                push.version,
                time(push.seconds["total"]),
                time(push.pause),
                time(push.apply),
                size(push.kept_gpu_memory),
            )
            for push in results.pushes
        ),
    )


def _generation(results: Generation) -> str:
    return f"{results.requests} prompts at once, medians of {results.setting.repeats} rounds:\n\n" + table(
        ("way", "tokens/s", "of the bare `AsyncLLM`, median of rounds"),
        ((way, f"{rate.tokens_per_second:.0f}", f"{100 * rate.of_async_llm:.0f} %") for way, rate in results.summary.items()),
    )


def write(results: Path, docs: Path) -> None:
    """Writes `benchmarks.md` and `push.svg` into `docs`."""
    for name, text in texts(results).items():
        (docs / name).write_text(text)


def texts(results: Path) -> dict[str, str]:
    """Returns the texts of all files, by the name of the file."""
    kept = read(results)
    pictured = [found for name in PICTURED if isinstance(found := kept[name], Results)]
    rows = [row for found in pictured for row in beside(found)]
    settings = [found.setting for found in pictured]
    captions = dict.fromkeys(f"{', '.join(one.machine)}, vLLM {one.versions['vllm']}, {one.date}, medians" for one in settings)
    return {"benchmarks.md": page(kept), "push.svg": picture(rows, list(captions))}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(str(__doc__))
    write(Path(sys.argv[1]), Path(sys.argv[2]))
