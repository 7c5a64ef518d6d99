"""Groups the layers of a plan and its pushes' receipts into rows, equal layers in one row, and
makes tables of them. Pure functions."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import torch
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from instep.bench.report import size, time
from instep.plan.routes import Plan
from instep.protocol import ParamMeta
from instep.receipt import EngineReceipt, Receipt

Way = Literal["direct", "rebuilt", "reload", "kept"]
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
PHASES = ("describe", "plan", "publish", "prepare", "commit")


class Row(msgspec.Struct, frozen=True):
    """Layers that differ in the numbers of their names alone. params, routes and nbytes are those
    of one layer.

    params: as `weight bfloat16[96, 64]`, of the first worker that has the layer. routes, nbytes:
    copies from the source, and bytes that they have to fill, over all workers. reason: of `reload`
    and `kept`.
    """

    name: str
    layers: list[str]
    params: list[str]
    routes: int
    nbytes: int
    way: Way
    reason: str | None = None


class Timed(msgspec.Struct, frozen=True):
    """One push. seconds: by phase, as in `Receipt`; of `commit`, `apply` is the slowest worker's
    loader."""

    seconds: dict[str, float]
    apply: float
    pause: float


class Report(msgspec.Struct, frozen=True):
    """kept: parameters that a push leaves alone, and why. casts: tensors that are rounded to
    another dtype, as `float32 to bfloat16`.
    widened: those that are stored in a wider one, as `bfloat16 to float32`. Equal names are drawn
    together in all three. why: what spoke against faster transports. compared: how many layers the
    first push has compared with vLLM's initial load, in `initial` seconds.
    unproved: those that it could not, and why."""

    model: str
    engine: str
    nbytes: int
    tensors: int
    transport: str
    why: str
    rows: list[Row]
    kept: dict[str, str]
    casts: dict[str, str]
    widened: dict[str, str]
    first: Timed
    second: Timed
    compared: int = 0
    initial: float = 0.0
    unproved: dict[str, str] = {}


def rows(plan: Plan, receipt: EngineReceipt) -> list[Row]:
    """Returns one row for each kind of layer, in the order of the engine's parameters. Layers
    without parameters of their own come last."""
    params: dict[str, dict[int, list[ParamMeta]]] = defaultdict(lambda: defaultdict(list))
    routes: Counter[str] = Counter()
    for rank, worker in enumerate(plan.workers):
        layer_of = {param.name: param.layer for param in worker.params}
        for param in worker.params:
            params[param.layer][rank].append(param)
        routes.update(layer_of[route.param] for route in worker.routes if route.tensor is not None)
    found: dict[tuple[str, tuple[str, ...], int, int, Way, str | None], list[str]] = defaultdict(list)
    for layer in dict.fromkeys((*params, *receipt.direct, *receipt.rebuilt, *receipt.reload)):
        by_rank = params.get(layer, {})
        shown = tuple(f"{param.name.rpartition('.')[2]} {param.dtype}{list(param.shape)}" for param in next(iter(by_rank.values()), []))
        way, reason = _way(layer, receipt, [param for group in by_rank.values() for param in group])
        nbytes = sum(_nbytes(param) for group in by_rank.values() for param in group)
        found[NUMBER.sub("*", layer), shown, routes[layer], nbytes, way, reason].append(layer)
    return [Row(together(layers), layers, list(key[1]), *key[2:]) for key, layers in found.items()]


def together(names: Sequence[str]) -> str:
    """Returns one name for names that differ only in their numbers: `layers.0..2,5.mlp`."""
    columns = zip(*(map(int, NUMBER.findall(name)) for name in names), strict=True)
    spans = iter([_spans(sorted(set(column))) for column in columns])
    return NUMBER.sub(lambda _: next(spans), names[0])


def _spans(numbers: Sequence[int]) -> str:
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ",".join(str(start) if start == end else f"{start}..{end}" for start, end in zip(starts, ends, strict=True))


def alike(texts: Mapping[str, str]) -> dict[str, str]:
    """Merges names that differ only in their numbers and have the same text. Returns the texts
    by name."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, text in texts.items():
        groups[NUMBER.sub("*", name), NUMBER.sub("*", text)].append(name)
    return {together(names): text for (_, text), names in groups.items()}


def timed(receipt: Receipt) -> Timed:
    """Returns the times of a push to one engine."""
    return Timed(receipt.seconds, receipt.engines[0].apply, receipt.pause)


def _way(layer: str, receipt: EngineReceipt, params: Sequence[ParamMeta]) -> tuple[Way, str | None]:
    if layer in receipt.reload:
        return "reload", NUMBER.sub("*", receipt.reload[layer])
    if layer in receipt.rebuilt:
        return "rebuilt", None
    if layer in receipt.direct:
        return "direct", None
    return "kept", next((NUMBER.sub("*", param.kept) for param in params if param.kept), None)


def _nbytes(param: ParamMeta) -> int:
    dtype: torch.dtype = getattr(torch, param.dtype)
    return (math.prod(param.shape) - param.spare) * dtype.itemsize


def tables(report: Report) -> Group:
    """Makes tables for a terminal."""
    head = f"{report.model} into {report.engine}: {size(report.nbytes)} in {report.tensors} tensors"
    transport = f"transport {report.transport}" + (f": {report.why}" if report.why else "")
    notes = [f"{name} is kept: {why}" for name, why in report.kept.items()]
    notes += [f"{name} is rounded from {cast}: a WeightSync needs cast=True for it" for name, cast in report.casts.items()]
    notes += [f"{name} is widened from {cast}: no value changes, and no cast=True is needed" for name, cast in report.widened.items()]
    notes = [_expected(report.first, report.second), transport, *_compared(report), *notes]
    parts = (Text(head), _layers(report.rows), Text(_sums(report.rows)), _pushes(report), Text("\n".join(notes)))
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def _layers(rows: Iterable[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("layer", "count", "parameters", "routes each", "bytes each", "way", "why"):
        table.add_column(name, justify="right" if name in ("count", "routes each", "bytes each") else "left", overflow="fold")
    for row in rows:
        texts = (row.name, str(len(row.layers)), ", ".join(row.params), str(row.routes), size(row.nbytes), row.way, row.reason or "")
        table.add_row(*map(Text, texts))  # brackets of shapes are no markup
    return table


def _sums(rows: Sequence[Row]) -> str:
    parts = []
    for way in ("direct", "rebuilt", "reload", "kept"):
        of_way = [row for row in rows if row.way == way]
        if of_way:
            nbytes = sum(len(row.layers) * row.nbytes for row in of_way)
            parts.append(f"{way} {sum(len(row.layers) for row in of_way)} layers, {size(nbytes)}")
    return "; ".join(parts)


def _expected(first: Timed, second: Timed) -> str:
    text = f"expected here: {time(second.seconds['total'])} a push, generation paused for {time(second.pause)} of it"
    return f"{text}; the first push {time(first.seconds['total'])}, because every layer is reloaded once"


def _compared(report: Report) -> list[str]:
    text = f"vLLM's reload leaves {report.compared} layers as its initial load makes them, bit for bit"
    seen = [f"{text}: {time(report.initial)} of the first push"] if report.compared else []
    return seen + [f"{name} is not proved beyond vLLM's loader: {why}" for name, why in report.unproved.items()]


def _pushes(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("push", *PHASES, "of it apply", "paused", "total"):
        table.add_column(name, justify="left" if name == "push" else "right")
    for name, push in (("first", report.first), ("second", report.second)):
        seconds = [*(push.seconds.get(phase, 0.0) for phase in PHASES), push.apply, push.pause, push.seconds["total"]]
        table.add_row(name, *map(time, seconds))
    return table
