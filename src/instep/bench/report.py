"""Makes the tables and the JSON of a run. Pure functions of its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from instep.bench.results import Copy, Limit, Results, Row, Setting, Summary, summarize

ERROR_LENGTH = 160
NONE = "–"


def as_json(results: Results) -> str:
    """Returns all measurements and their summaries."""
    everything = {**msgspec.to_builtins(results), "summaries": msgspec.to_builtins(summarize(results))}
    return msgspec.json.format(msgspec.json.encode(everything), indent=1).decode()


def tables(results: Results) -> str:
    """Returns the tables as Markdown."""
    setting = results.setting
    parts = [
        f"{head(setting)}; medians of {setting.repeats}",
        table(
            ("way", "engine", "push", "paused", "push / limit", "rival / push", "first push", "extra memory (in the first)"),
            (_row(row, summary) for row, summary in zip(results.rows, summarize(results), strict=True)),
        ),
        table(
            ("limit", "engine", "message", "rate", "the model's bytes"),
            ((one.name, one.engine, size(one.nbytes), rate(one.rate), time(setting.nbytes / one.rate)) for one in results.limits),
        ),
        table(("copies of one plan", "to", "regions", "time", "rate"), map(_copy, results.copies)),
        "\n".join(
            f"calls to the engine on {engine}: " + ", ".join(f"{name} {time(value)}" for name, value in seconds.items())
            for engine, seconds in results.calls.items()
        ),
        "\n".join(results.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def head(setting: Setting) -> str:
    """Describes in one sentence where the numbers come from."""
    versions = ", ".join(f"{name} {number}" for name, number in setting.versions.items())
    model = f"{setting.shapes}, {size(setting.nbytes)} in {setting.tensors} tensors"
    return f"{model}; {', '.join(setting.machine)}; {versions}; {setting.date}; `{setting.command}`"


def _row(row: Row, summary: Summary) -> Sequence[str]:
    if not row.runs:
        return row.way, row.engine, _failed(row.error), *[NONE] * 5
    medians = summary.medians
    memory = ", ".join(f"{place} {size(nbytes)} ({size(row.cold_memory[place])})" for place, nbytes in row.memory.items())
    return (
        row.way, row.engine, time(medians["total"]), time(medians["pause"]), _times(summary.of_limit), _times(summary.rival_over_this),
        NONE if row.cold is None else time(row.cold), memory or NONE,
    )  # fmt: skip


def _copy(copy: Copy) -> Sequence[str]:
    if not copy.seconds:
        return copy.method, copy.to, str(copy.regions), _failed(copy.error), NONE
    limit = Limit(name=copy.method, engine=copy.to, nbytes=copy.nbytes, seconds=copy.seconds)
    return copy.method, copy.to, str(copy.regions), time(copy.nbytes / limit.rate), rate(limit.rate)


def _failed(error: str | None) -> str:
    text = " ".join((error or "not measured").split()).replace("|", "/")
    return "failed: " + (text if len(text) <= ERROR_LENGTH else text[:ERROR_LENGTH] + " ...")


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


def time(seconds: float) -> str:
    """Formats seconds to three digits, in milliseconds below ten seconds."""
    milliseconds = 1e3 * seconds
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.3g} GB/s" if bytes_a_second < 1e11 else f"{bytes_a_second / 1e9:.0f} GB/s"


def size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if abs(nbytes) >= 1e9 else f"{nbytes / 1e6:.0f} MB" if abs(nbytes) >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) if lines else ""
