"""CUDA IPC from several ranks: each shares its own shards where they lie, and workers pull from all
of them. Nothing is gathered.

Only what no rank holds as it is sent is gathered in rank 0, in buffers on its GPU that are kept:
tensors that rank 0 makes, that have another dtype, or whose parts cut an 8-byte word. Every rank
sums up what it shares while workers pull it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import torch

from instep.digest import MASK
from instep.plan.shards import Piece
from instep.protocol import Identity, Location, TensorMeta, decode, encode
from instep.ranks.gather import ByteRange
from instep.ranks.lead import RankedSource
from instep.ranks.run import Run
from instep.transport import Published, Sending
from instep.transport.ipc.export import Exposed, Offer, located
from instep.transport.ipc.publish import IpcTransport, with_digests
from instep.transport.parts import Part, place_of, whole

PartSums = dict[str, tuple[int, bool]]
"""See `Exposed.result`."""
Local = Callable[[str], torch.Tensor]
"""See `ShardedModule.local`."""


class Expose(msgspec.Struct, frozen=True):
    """Asks each rank to share what it gives of these tensors. known: the marks of offers that rank
    0 has."""

    tensors: list[TensorMeta]
    known: list[str]


class Shared(msgspec.Struct, frozen=True):
    """What a rank shares. mark: a hash of the offer. offer: None where rank 0 has it already.
    unshared: tensors whose parts this rank cannot share as they lie."""

    mark: str
    offer: Offer | None
    unshared: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """What a rank gives, valid until one of its tensors moves. parts: those that other processes
    can read in place."""

    tensors: list[TensorMeta]
    given: Sequence[Piece]
    places: dict[str, Hashable]
    parts: list[Part]
    unshared: list[str]


def look(given: Sequence[Piece], tensors: list[TensorMeta], local: Local, device: torch.device, last: Own | None) -> Own:
    """Works out where the pieces that a rank gives lie now. Returns `last` if nothing has moved."""
    found = {live: local(live) for live in dict.fromkeys(piece.live for piece in given)}
    places = {live: place_of(tensor) for live, tensor in found.items()}
    if last is not None and (last.places, last.given, last.tensors) == (places, given, tensors):
        return last
    metas = {meta.name: meta for meta in tensors}
    flat = {live: tensor.detach().reshape(-1) for live, tensor in found.items() if tensor.is_contiguous()}
    parts = [Part(metas[piece.tensor], flat[piece.live], piece.rows) for piece in given if piece.live in flat]
    unshared = {piece.tensor for piece in given if piece.live not in flat} | {part.meta.name for part in parts if not part.readable(device)}
    return Own(tensors, given, places, [part for part in parts if part.meta.name not in unshared], sorted(unshared))


class Sharing:
    """The part of a rank other than 0."""

    def __init__(self) -> None:
        self.own: Own | None = None
        self.exposed: Exposed | None = None
        self.mark = ""

    def expose(self, given: Sequence[Piece], wanted: Expose, local: Local, device: torch.device) -> Shared:
        """Shares this rank's parts and starts to sum them up. Raises `TransportError` where the
        memory of this process cannot be shared."""
        own = look(given, wanted.tensors, local, device, self.own)
        if self.exposed is None or own is not self.own:
            self.exposed = Exposed(own.parts, device, self.exposed.handles if self.exposed else {})
            self.own, self.mark = own, hashlib.blake2b(encode(self.exposed.offer), digest_size=16).hexdigest()
        self.exposed.launch()
        return Shared(self.mark, None if self.mark in wanted.known else self.exposed.offer, own.unshared)

    def sums(self) -> PartSums:
        assert self.exposed is not None
        return self.exposed.result()

    def close(self) -> None:
        self.own = self.exposed = None


@dataclass(frozen=True, slots=True)
class _Laid:
    """A version as all ranks share it. staged: tensors that are gathered in rank 0."""

    own: Own
    marks: list[str]
    staged: dict[str, torch.Tensor]
    exposed: Exposed
    location: Location


class SharedIpc(IpcTransport):
    """The part of rank 0. Each rank sums up its own parts, so workers cannot read all sums."""

    digests_apart = False

    def __init__(self, source: RankedSource) -> None:
        super().__init__()
        self.source = source
        self.offers: dict[str, Offer] = {}  # of the other ranks, by mark
        self.laid: _Laid | None = None

    def why_not(self, device: torch.device, workers: Sequence[Identity]) -> str | None:
        return super().why_not(device, workers) or self.source.elsewhere

    def publish(self, tensors: list[TensorMeta], _: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """Publishes the version. If no shard has moved since the last time, only the digests are
        taken anew."""
        source, channel, last = self.source, self.source.channel, self.laid
        run = source.run(tensors)
        channel.tell("expose", Expose(tensors, list(self.offers)))
        own = look(run.given[0], tensors, source.module.local, source.device, last.own if last else None)
        others = [decode(answer, Shared) for answer in channel.collect()]
        self.offers = {other.mark: other.offer or self.offers[other.mark] for other in others}
        marks = [other.mark for other in others]
        unshared = source.made.union(own.unshared, *(other.unshared for other in others))
        if last is None or last.own is not own or last.marks != marks or last.staged.keys() != unshared:
            self.laid = last = self._share(run, own, marks, unshared)
        if last.staged:
            source.note()
        self._stage(run, last.staged)
        last.exposed.launch()
        channel.tell("sums")
        self.summed = None
        return Published(last.location, {})

    @asynccontextmanager
    async def serving(self, step: str) -> AsyncIterator[Sending]:
        """Collects the sums at the end of `prepare`. If a rank has died by then, engines keep what
        they serve."""
        yield self
        if step == "prepare":
            self.summed = self._summed()
            if self.laid is not None and self.laid.staged:
                self.source.check()

    def _summed(self) -> Published:
        """Collects the sums of all ranks and returns the publication with digests."""
        assert self.laid is not None
        sums = self.laid.exposed.result()
        for answer in self.source.channel.collect():
            _add(sums, decode(answer, PartSums), self.laid.staged)
        return with_digests(self.laid.location, self.laid.own.tensors, sums)

    def _share(self, run: Run, own: Own, marks: list[str], unshared: Set[str]) -> _Laid:
        device = self.source.device
        staged = {name: self._room(meta, device) for name, meta in run.metas.items() if name in unshared}
        copies = [whole(run.metas[name], room.reshape(-1)) for name, room in staged.items()]
        exposed = Exposed([*(part for part in own.parts if part.meta.name not in staged), *copies], device, self.handles)
        self.handles = exposed.handles
        others = [_without(offer, staged) for offer in self.offers.values()]
        return _Laid(own, marks, staged, exposed, located(run.tensors, [exposed.offer, *others]))

    def _stage(self, run: Run, staged: dict[str, torch.Tensor]) -> None:
        made = self.source.made
        for name, room in staged.items():
            if name in made:
                room.copy_(self.source.value(name))
        if rooms := {name: room.reshape(-1).view(torch.uint8) for name, room in staged.items() if name not in made}:
            self.source.channel.ask("send", run.tensors)
            stretches = [ByteRange(False, run.offsets[name], run.offsets[name] + len(room)) for name, room in rooms.items()]
            for _ in self.source.fill(run, self.source.device, stretches, iter(rooms.values())):
                pass

    def close(self) -> None:
        super().close()
        self.offers, self.laid = {}, None


def _without(offer: Offer, staged: Collection[str]) -> Offer:
    return Offer(offer.handles, {name: places for name, places in offer.places.items() if name not in staged})


def _add(sums: PartSums, others: PartSums, staged: Collection[str]) -> None:
    """Adds the sums of another rank. Tensors that are gathered in rank 0 are skipped."""
    for name, (part, flag) in others.items():
        if name not in staged:
            before, flagged = sums.get(name, (0, False))
            sums[name] = ((before + part) & MASK, flagged or flag)
