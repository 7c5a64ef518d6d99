"""Checks whether an engine holds what a source has, by digests of its live storage and by a
canary. Changes nothing."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from instep.digest import MASK, digest, seed_of, unordered
from instep.engine import connect
from instep.engine.member import Member
from instep.errors import SourceError, VersionConflict
from instep.plan.region import covered, view
from instep.plan.routes import apart, check_metadata, signature
from instep.protocol import Region, TensorMeta
from instep.readback import DigestRequest, Held, Part
from instep.source import Source, open_source, unchanged
from instep.source.guarded import Guarded

BATCH = 256 << 20  # bytes of tensors that workers read back in one call: the engine's next step waits for it
REARRANGED = "the engine keeps {} in a layout of its own, with the same elements"
LAYOUT_NOT_SHOWN = "; no push has shown yet that the engine keeps this layer as the checkpoint has it"

Batch = list[tuple[TensorMeta, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of comparing one engine with a source.

    equal: tensors whose bytes are in live storage. differing, unread: the others by name, with what
    is wrong or why it cannot be known.
    nbytes: of those that are equal. compared, total: bytes of those that were read back, and of
    all.
    canary_gap: largest difference of a log-probability; None where it was not asked for, or the
    source has no forward.
    """

    engine: str
    version: str | None
    dirty: bool
    equal: int = 0
    nbytes: int = 0
    compared: int = 0
    total: int = 0
    differing: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    canary_gap: float | None = None

    @property
    def share(self) -> float:
        """Which part of the source's bytes was read back and compared, from 0 to 1."""
        return self.compared / self.total if self.total else 1.0


async def verify(source: object, engine: object, *, deadline: float = 60.0, canary: Sequence[int] = ()) -> Verified:
    """Compares every tensor of `source` with what the workers of `engine` hold. Generation goes on
    between batches of tensors.

    deadline: seconds that each call may take. canary: token ids that both score.

    Raises `PlanError` where the two do not fit at all, `VersionConflict` where a push came in
    between, and what a push raises for an engine that does not answer.
    """
    read, member = Guarded(open_source(source)), Member(connect(engine), uuid.uuid4().hex, deadline)
    tensors = list(read.metadata())
    check_metadata(tensors)
    await member.hello()
    found = Verified(member.name, member.version, member.serving == "dirty")
    equal: list[TensorMeta] = []
    with unchanged(read):
        async for batch, held in _asked(member, read, tensors, {meta.name for meta in tensors}):
            equal += _compared(batch, held, found)
        unproved = {name for name, why in found.differing.items() if why.endswith(LAYOUT_NOT_SHOWN)}
        if len(unproved) == len(found.differing):  # otherwise it differs anyway
            for name, why in (await _rearranged(member, read, tensors, unproved)).items():
                found.unread[name] = why
                del found.differing[name]
    sizes = {meta.name: meta.nbytes for meta in tensors if not meta.alias_of}
    nbytes, total = sum(meta.nbytes for meta in equal), sum(sizes.values())
    compared = total - sum(sizes.get(name, 0) for name in found.unread)
    found = replace(found, equal=len(equal), nbytes=nbytes, compared=compared, total=total)
    if expected := read.score(list(canary)) if canary else None:
        scores = await member.bounded("canary", member.engine.score(list(canary)))
        found = replace(found, canary_gap=float((torch.tensor(scores) - torch.tensor(expected)).abs().max()))
    return found


async def _asked(
    member: Member, source: Source, tensors: Sequence[TensorMeta], names: Set[str], *, in_order: bool = True
) -> AsyncIterator[tuple[Batch, list[Held]]]:
    """Yields the source's tensors of these names, batch by batch, with what each worker holds of
    them."""
    version = member.version
    for batch in _batches(source, tensors, names):
        request = DigestRequest(list(tensors), signature(tensors), [meta.name for meta, _ in batch], not in_order)
        held = await member.call("digest", Held, request)
        if member.version != version:
            raise VersionConflict(f"{member.name} took {member.version!r} while it was compared: compare again")
        yield batch, held


def _batches(source: Source, tensors: Sequence[TensorMeta], names: Set[str]) -> Iterator[Batch]:
    metas = {meta.name: meta for meta in tensors}
    batch: Batch = []
    for name, value in source.tensors():
        if name not in metas:
            raise SourceError(f"{name} was not there when the source was described", tensor=name)
        if name not in names:
            continue
        if batch and sum(meta.nbytes for meta, _ in batch) + metas[name].nbytes > BATCH:
            yield batch
            batch = []
        batch.append((metas[name], value))
    if batch:
        yield batch


async def _rearranged(member: Member, source: Source, tensors: Sequence[TensorMeta], names: Set[str]) -> dict[str, str]:
    """Finds tensors whose parameters have the same elements in another order. It is asked about
    those that differ where no push has shown how the engine keeps them. Returns for each why it
    is not read back."""
    have: dict[tuple[int, str], int] = {}
    want: dict[tuple[int, str], int] = defaultdict(int)
    places: dict[str, set[tuple[int, str]]] = defaultdict(set)
    async for batch, held in _asked(member, source, tensors, names, in_order=False):
        values = {meta.name: value for meta, value in batch}
        for rank, part in ((rank, part) for rank, worker in enumerate(held) for part in worker.parts):
            place, value = (rank, part.param), values[part.tensor].to(getattr(torch, part.dtype)).contiguous()
            have[place] = part.total
            want[place] += sum(unordered(view(value, region)) for region in part.regions)
            places[part.tensor].add(place)
    same = {place for place, total in have.items() if total == want[place] & MASK}
    return {name: REARRANGED.format(min(of)[1]) for name, of in places.items() if of <= same}


def _compared(batch: Batch, held: Sequence[Held], found: Verified) -> Iterator[TensorMeta]:
    """Yields the tensors that are equal. The others are noted in `found`."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for worker in held:
        for part in worker.parts:
            parts[part.tensor].append(part)
    unread = {name: why for worker in held for name, why in worker.unread.items()}
    for meta, value in batch:
        wrong, certain = _difference(meta, value, parts[meta.name])
        if wrong is None:
            yield meta
        elif meta.name in unread and not certain:
            found.unread[meta.name] = unread[meta.name]
        else:
            found.differing[meta.name] = wrong


def _difference(meta: TensorMeta, value: torch.Tensor, parts: Sequence[Part]) -> tuple[str | None, bool]:
    """Returns what is wrong with the workers' parts of a tensor, or None, and whether that is
    certain whatever they could not read."""
    dtypes = {part.dtype: [other for other in parts if other.dtype == part.dtype] for part in parts}
    if len(dtypes) > 1:  # each is compared with the value in its own
        found = [_difference(meta, value, some) for some in dtypes.values()]
        return max(found, key=lambda one: (one[0] is not None, one[1]))
    sums: dict[frozenset[Region], set[int]] = defaultdict(set)
    for part in parts:
        sums[frozenset(part.regions)].add(part.total)
    if any(len(told) > 1 for told in sums.values()):
        return "two workers or layers hold it with different bytes", True
    regions = [region for part in sums for region in part]
    if (got := covered(regions, meta.shape)) < meta.numel:
        return f"only {got} of its {meta.numel} elements were found", False
    if not apart(regions, meta.shape):
        return "its parts overlap: they cannot be put together", False
    stored = TensorMeta(meta.name, next(iter(dtypes)), meta.shape)
    total = (seed_of(stored) + sum(total for (total,) in sums.values())) & MASK
    wanted = digest(value.to(getattr(torch, stored.dtype)), stored)
    if total == wanted:
        return None, True
    unproved = "" if len(meta.shape) < 2 or all(part.proved for part in parts) else LAYOUT_NOT_SHOWN  # a vector has no other layout
    return f"digest {total:016x}, the checkpoint's is {wanted:016x}{unproved}", True
