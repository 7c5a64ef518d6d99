"""The bytes of a version during one commit: how direct layers get them, and how the worker proves
that they did.

Published bytes that are mapped into this process are copied region by region and compared with live
storage. Bytes in another process's GPU memory are pulled by one kernel, which takes their digests
on the way. For bytes that pass by in buckets see `stream.py`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

from instep.errors import DigestMismatch, TransportError
from instep.protocol import Manifest, Route, TensorMeta
from instep.receiver import cuda_compare
from instep.receiver.apply import Applier
from instep.receiver.copies import Copies
from instep.receiver.lazy import Lazy
from instep.receiver.proof import Proof, check_places
from instep.receiver.pull import Puller
from instep.receiver.regions import Tensors, copy_regions, holds
from instep.receiver.stream import Streamed
from instep.receiver.strips import RouteStrips
from instep.transport.reader import Passing, Reader, Remote, Visible


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that was opened. session: the trainer's session. arrival: gives the seconds that
    the bytes took, and the digests of what has arrived."""

    manifest: Manifest
    session: str
    reader: Reader
    arrival: Future[tuple[float, dict[str, int]]]


class Seen:
    """Bytes that are mapped into this process's address space. reader: whose bytes they are, where
    they lie in one run."""

    once = False

    def __init__(self, tensors: Tensors, listed: Sequence[TensorMeta], reader: Visible | None = None) -> None:
        self.tensors, self.listed, self.reader = tensors, listed, reader

    def move(self, copies: Copies, _: Copies | None, *, in_turn: bool) -> Tensors:  # noqa: ARG002
        strips = self._strips(copies)
        if strips is not None:
            strips[0].take(strips[1])
        copy_regions(strips[0].others if strips else copies.routes, copies.live, self.tensors)
        return self.tensors

    def _strips(self, copies: Copies) -> tuple[RouteStrips, int] | None:
        """Returns what can be copied without a tensor for each route, and the version's address.
        Worked out once for parameters and tensors that stay where they are."""
        if self.reader is None or self.reader.flat is None:
            return None
        offsets = self.reader.offsets
        strips = copies.worked_out[1] if copies.worked_out else None
        if not isinstance(strips, RouteStrips) or not strips.holds_for(copies, self.listed, offsets):
            strips = RouteStrips(copies, self.listed, offsets)
            copies.worked_out = ("strips", strips)
        return strips, self.reader.flat.data_ptr()

    def held(self, watched: Copies) -> list[bool]:
        """Returns, for each route, whether live storage holds what the route brings."""
        return [self._holds(watched, route) for route in watched.routes]

    def _holds(self, watched: Copies, route: Route) -> bool:
        known = watched.compares(route) and route.param not in watched.elsewhere
        return known and holds(watched.live[route.param], route, self.tensors)

    def brought(self, watched: Copies) -> list[bool]:
        return [True for _ in watched.routes]

    def settle(self) -> None:
        """Returns at once: there is nothing to wait for."""

    def prove(self, applier: Applier) -> Proof:
        """Compares direct layers with the published bytes, bit by bit, and counts the tensors.
        Raises `DigestMismatch` naming the first that differs."""
        copies = applier.copies()
        strips = self._strips(copies)
        proved = strips is not None and strips[0].equal(strips[1])
        for route in strips[0].others if strips and proved else copies.routes:
            if not holds(copies.live[route.param], route, self.tensors):
                raise DigestMismatch(f"{route.param} does not hold the bytes of {route.tensor} after the copy", tensor=route.tensor)
        return Proof(len(applier.read.union(route.tensor for route in copies.routes if route.tensor)), complete=True)

    def forget(self) -> None:
        self.tensors, self.reader = {}, None


class Pulled:
    """Bytes in the memory of a GPU that another process owns.

    launch: number of the launch of the trainer's sums (see `protocol.CommitRequest`). wholes: see
    `protocol.PrepareRequest`.
    """

    once = False

    def __init__(self, manifest: Manifest, reader: Remote, launch: int, wholes: Collection[str] = ()) -> None:
        self.address, self.reader, self.in_one = manifest.location.address, reader, wholes
        self.listed: Sequence[TensorMeta] = manifest.tensors
        self.puller: Puller | None = None  # of direct layers, where there are any
        self.watched: Copies | None = None
        self.reads: tuple[cuda_compare.Reads, list[int]] | None = None
        reader.wait_for(launch)  # before anything is pulled, or written

    @cached_property
    def metas(self) -> Mapping[str, TensorMeta]:
        return self.puller.metas if self.puller else {meta.name: meta for meta in self.listed}

    def move(self, copies: Copies, watched: Copies | None, *, in_turn: bool) -> Tensors:  # noqa: ARG002
        if copies.routes:
            # Memory that is mapped again may have another address.
            at = (self.address, *self.reader.bases, *self.in_one)
            if copies.worked_out is None or copies.worked_out[0] != at:
                copies.worked_out = (at, Puller(copies, self.metas, self.reader, self.in_one))
            puller: Puller = copies.worked_out[1]
            puller.launch(self.reader)
            self.puller = puller
        self.watched, self.every = watched, copies.every
        return self.tensors

    @cached_property
    def tensors(self) -> Tensors:
        return Lazy(self.metas, self.reader.tensor, self.reader.tensors)

    def held(self, watched: Copies) -> Sequence[object]:
        return cuda_compare.held(watched, self.metas, self.reader.device)

    def brought(self, watched: Copies) -> Sequence[object]:
        reads, sums = self._read()
        return reads.brought(sums)[: len(watched.asked)]

    def _read(self) -> tuple[cuda_compare.Reads, list[int]]:
        """Sums up, once, the regions that other layers read and those that this worker cuts out of
        whole tensors."""
        if self.reads is None:
            reads = self._reads()
            summed = cuda_compare.summed(list(chain.from_iterable(reads.runs)), len(reads.regions), self.reader.device)
            self.reads = reads, reads.sums(summed, self.reader.sums(), self.tensors)
        return self.reads

    def _reads(self) -> cuda_compare.Reads:
        """Returns the regions to read. They are worked out once for the same copies and addresses,
        because that takes milliseconds."""
        pulled, others = self.puller, self.watched
        if pulled and pulled.reads and pulled.reads[0] is others:
            known: cuda_compare.Reads = pulled.reads[1]
            return known
        asked = [*(others.asked if others else ()), *(pulled.moves.asked if pulled else ())]
        reads = cuda_compare.Reads(asked, self.every, self.metas, self.reader.places)
        if pulled:
            pulled.reads = others, reads
        return reads

    def settle(self) -> None:
        if self.puller:
            self.puller.wait()
        torch.cuda.synchronize(self.reader.device)

    def prove(self, applier: Applier) -> Proof:
        """Returns how many tensors were summed up while they were pulled, their sums, and the sums
        that the trainer's GPU has published.

        Raises `ApplyError` where the reload session has moved a layer that had been written
        directly.
        """
        if self.puller is not None:
            check_places(self.puller.copies, applier)
            names, theirs = self.reader.board()
            if applier.host.world_size == 1 and self.watched is None and self.puller.proves(names, theirs):
                return Proof(len(names), complete=True)
        reads, sums = self._read()
        some = [self.puller.sums() if self.puller else {}, reads.parts(sums, self.in_one)]
        return Proof.of(self.reader.sums(), some, self.reader.told(), applier.wanted(self.metas))

    def forget(self) -> None:
        """Does nothing: tensors are made when they are asked for, and none is kept."""


def arrive(manifest: Manifest, reader: Reader, launch: int = 0, wholes: Collection[str] = ()) -> Seen | Pulled | Streamed:
    """Chooses how a version's bytes come in. Where the trainer sends them it waits for the first
    bucket, before anything is written.

    launch: number of the launch of the trainer's sums (see `protocol.CommitRequest`). wholes: see
    `protocol.PrepareRequest`.
    """
    if isinstance(reader, Visible):
        return Seen(Lazy({meta.name: meta for meta in manifest.tensors}, reader.tensor), manifest.tensors, reader)
    if isinstance(reader, Remote):
        return Pulled(manifest, reader, launch, wholes)
    assert isinstance(reader, Passing)
    return Streamed(manifest, reader, wholes)


def arriving(manifest: Manifest, reader: Reader, checker: Executor) -> Future[tuple[float, dict[str, int]]]:
    """Begins to look at what arrives, and returns what `check_arrival` will. What takes less time
    than `checker` takes to begin is done at once."""
    if reader.fetches and not reader.at_once:
        return checker.submit(check_arrival, manifest, reader)
    done: Future[tuple[float, dict[str, int]]] = Future()
    try:
        done.set_result(check_arrival(manifest, reader) if reader.fetches else (0.0, {}))
    except Exception as error:
        done.set_exception(error)
    return done


def check_arrival(manifest: Manifest, reader: Reader) -> tuple[float, dict[str, int]]:
    """Waits for the bytes. Returns the seconds that took, and the digests of what has arrived.

    Raises `DigestMismatch` naming the first tensor whose bytes are not those that the trainer
    published. That needs digests in the manifest, and a worker that has read all bytes.
    """
    started = time.perf_counter()
    digests = reader.arrive([meta for meta in manifest.tensors if not meta.alias_of])
    for name, got in digests.items() if manifest.digests and not reader.split else ():
        if name not in manifest.digests:
            raise TransportError(f"the manifest has no digest for {name}", tensor=name)
        if got != manifest.digests[name]:
            raise DigestMismatch.of(name, got, manifest.digests[name])
    return time.perf_counter() - started, digests
