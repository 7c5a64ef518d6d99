"""Compares what workers summed up with the trainer's digests. Pure functions of numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from instep.digest import MASK, seed_of
from instep.errors import DigestMismatch, PlanError
from instep.plan.routes import Plan
from instep.protocol import Arrival, Region, TensorMeta, WorkerReceipt


def vector(numbers: Mapping[str, int], tensors: Sequence[TensorMeta]) -> bytes:
    """Returns a number of 64 bits for each tensor that is no alias, in the order of the list: 8
    bytes where a name takes 60. 0 for one without a number. No bytes if there are no numbers."""
    own = [numbers.get(meta.name, 0) for meta in tensors if not meta.alias_of] if numbers else []
    return np.array(own, "<u8").tobytes()


def named(data: bytes, tensors: Sequence[TensorMeta]) -> dict[str, int]:
    """Returns the numbers of a `vector`, by name. Raises `PlanError` where they are those of
    another list."""
    own = [meta.name for meta in tensors if not meta.alias_of] if data else []
    if len(data) != 8 * len(own):
        raise PlanError(f"{len(data)} bytes are not one number for each of {len(own)} tensors")
    return dict(zip(own, np.frombuffer(data, "<u8").tolist(), strict=True))


class Told(NamedTuple):
    """What one worker has summed up in a commit.

    wholes: sums of whole tensors. parts: sums of regions, by their numbers in the order of
    `plan.routes.reads`.
    """

    wholes: Mapping[str, int]
    parts: Mapping[str, Mapping[int, int]]


def add_up(told: Sequence[Told], theirs: Mapping[str, int]) -> bool:
    """Whether the sums of all workers add up to the trainer's sum of every tensor.

    Sums are keyed by position: workers that hold the same region have the same sum, which counts
    once. A sum of zero adds nothing, so it proves nothing.
    """
    wholes, parts = [one.wholes for one in told], [one.parts for one in told]
    left = theirs
    if len(told) == 1:  # a shortcut, because an engine is paused meanwhile
        left = {name: total for name, total in theirs.items() if parts[0].get(name) != {0: total} or name in wholes[0]}
    return bool(theirs) and all(_adds_up(name, total, wholes, parts) for name, total in left.items())


def _adds_up(name: str, total: int, wholes: Sequence[Mapping[str, int]], parts: Sequence[Mapping[str, Mapping[int, int]]]) -> bool:
    held = False
    for tensors in wholes:
        if name in tensors:
            held = True
            if tensors[name] != total:
                return False
    values: set[int] = set()
    for regions in parts:
        if name in regions:
            values.update(regions[name].values())
    if not values:
        return held
    return sum(values) & MASK == total and (len(values) == 1 or 0 not in values)


def check_sums(
    engine: str, plan: Plan, tensors: Sequence[TensorMeta], digests: Mapping[str, int], receipts: Sequence[WorkerReceipt]
) -> None:
    """Compares what workers summed up with the trainer's digests: whole tensors one by one, and
    regions added up, each once.

    receipts: in the order of the plan's workers. Raises `DigestMismatch` naming the first tensor
    that differs, or of which a worker has told less than it reads.
    """
    metas = {meta.name: meta for meta in tensors}
    told: dict[str, dict[Region, set[int]]] = defaultdict(lambda: defaultdict(set))
    for reads, receipt in zip(plan.reads, receipts, strict=True):
        for name, total in receipt.wholes.items():
            if (seed_of(metas[name]) + total) & MASK != digests[name]:
                raise DigestMismatch(f"{engine} rank {receipt.rank}: {name} was not pulled as the trainer has it", tensor=name)
        for name, regions in reads.items():
            parts = receipt.parts.get(name, {})
            if not receipt.proved and name not in receipt.wholes and len(parts) < len(regions):
                raise DigestMismatch(f"{engine} rank {receipt.rank} does not tell what it holds of {name}", tensor=name)
            for number, total in parts.items():
                told[name][regions[number]].add(total)
    for name, found in told.items():
        if any(len(totals) > 1 for totals in found.values()):
            raise DigestMismatch(f"{engine}: two workers hold the same part of {name} with different bytes", tensor=name)
        read = {region for reads in plan.reads for region in reads.get(name, ())}
        whole = name not in plan.wholes and found.keys() == read
        total = sum(totals.pop() for totals in found.values())
        if not whole or (seed_of(metas[name]) + total) & MASK != digests[name]:
            raise DigestMismatch(f"{engine}: the parts of {name} that its workers pulled are not the trainer's", tensor=name)


def check_parts(engine: str, tensors: Sequence[TensorMeta], digests: Mapping[str, int], told: Sequence[Mapping[str, int]]) -> None:
    """Compares what workers summed up before the commit with the trainer's digests. Each worker has
    summed up its share of the same bytes.

    Raises `DigestMismatch` naming the first tensor that differs. What a worker left out counts as a
    difference.
    """
    for meta in tensors:
        if meta.alias_of:
            continue
        got = (sum(parts.get(meta.name, 0) for parts in told) - (len(told) - 1) * seed_of(meta)) & MASK
        if got != (sent := digests[meta.name]):
            raise DigestMismatch.of(meta.name, got, sent, engine)


def check_arrivals(
    engine: str,
    tensors: Sequence[TensorMeta],
    digests: Callable[[], Mapping[str, int]],
    arrivals: Sequence[Arrival],
) -> None:
    """Compares the digests of bytes that have arrived with the trainer's. arrivals: in the order of
    the workers' ranks. The trainer's digests are not computed where no worker reports any.

    Raises `DigestMismatch` naming the first tensor that differs.
    """
    for rank, arrival in enumerate(arrivals):
        for name, got in named(arrival.digests, tensors).items():
            if got != (sent := digests()[name]):
                raise DigestMismatch.of(name, got, sent, f"{engine} rank {rank}")
    if any(arrival.parts for arrival in arrivals):
        check_parts(engine, tensors, digests(), [named(arrival.parts, tensors) for arrival in arrivals])
