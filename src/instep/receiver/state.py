"""The receiver: its calls, and what a worker knows between them.

                 prepare                    commit
    serving old ─────────▶ serving old ───────────────▶ serving new
         ▲       abort      (prepared)       │   │            ▲
         └────────────────────┘              │   └▶ unproved ─┘ accept: the trainer has proved it
                  fails after the first write▼
                                           dirty ── prepare, commit ──▶ serving new

Nothing visible changes before commit. A method never raises: what went wrong is the reply's fault,
because vLLM's executor loses step with its workers' replies after one of them raises.
"""

from __future__ import annotations

import gc
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, get_args

import torch
from msgspec import structs

from instep.digest import total
from instep.errors import ApplyError, ConfigError, InstepError, PlanError, VersionConflict
from instep.faults import fault_of
from instep.plan.routes import signature
from instep.plan.sums import vector
from instep.protocol import (
    Again,
    Arrival,
    CommitRequest,
    Identity,
    Manifest,
    Method,
    PrepareRequest,
    Reply,
    Request,
    TraceRequest,
    WorkerReceipt,
    decode,
    encode,
    raw,
)
from instep.readback import DigestRequest, Held
from instep.receiver import Host
from instep.receiver.adapter import AdapterHost, check_base, check_merged
from instep.receiver.apply import Applier
from instep.receiver.arrival import Prepared, arrive, arriving
from instep.receiver.kept import Kept
from instep.receiver.lease import Lease
from instep.receiver.readback import held
from instep.receiver.request import Expected, Lists
from instep.receiver.served import Serves, Taken
from instep.receiver.trace import trace
from instep.transport import host, uuid_of
from instep.transport.reader import Reader, Visible, WorkerContext
from instep.transport.registry import open_location

METHODS = get_args(Method)
WRITES = ("trace", "decide", "reserve", "prepare", "commit", "accept")
RESERVED = 60.0  # seconds of a lease whose trainer has given none


class Receiver(Serves):
    """One per worker, entered by `handle` alone. open_reader: how a published version is opened;
    tests replace it."""

    def __init__(self, host: Host, open_reader: Callable[[Manifest, WorkerContext], Reader] = open_location) -> None:
        super().__init__()
        self.host = host
        self.open_reader = open_reader
        self.incarnation = uuid.uuid4().hex
        self.kept = Kept()
        self.applier: Applier | None = None
        self.signature: str | None = None
        self.expected, self.lists = Expected([]), Lists()
        self.prepared: Prepared | None = None
        self.lease = Lease()
        self.last: PrepareRequest | None = None
        self.adapters: dict[int, Receiver] = {}
        self.checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="instep-arrival")

    def handle(self, method: str, payload: bytes) -> bytes:
        """Runs one call and encodes its reply. Never raises."""
        seq, body, fault = -1, None, None
        try:
            request = decode(payload, Request)
            seq = request.seq
            if request.adapter:
                check_base(self.merged, method)
                return self.of_adapter(request.adapter).handle(method, encode(structs.replace(request, adapter=0)))
            if method not in METHODS:
                raise ConfigError(f"unknown method {method!r}")
            if method in WRITES:
                self.lease.check_late(request.session, seq)
            self.check_awake(method)
            body = getattr(self, "status" if method == "hello" else method)(request)
        except Exception as error:
            fault = fault_of(error, otherwise="ApplyError")
            self.last_error = f"{method}: {fault.message}"
        return encode(Reply(seq, self.host.rank, self.state, self.version, fault, raw(body)))

    def of_adapter(self, number: int) -> Receiver:
        """Returns the adapter's own receiver. Raises `PlanError` where the engine serves none."""
        if number not in self.adapters:
            self.adapters[number] = Receiver(self.host.adapter(number), self.open_reader)
        return self.adapters[number]

    def dirty(self) -> str | None:
        """Returns why the model must not run, or None."""
        dirty = next((receiver for receiver in (self, *self.adapters.values()) if receiver.state != "serving"), None)
        return (dirty.last_error or "its last commit did not end") if dirty else None

    def status(self, request: Request) -> Identity:
        prepared = self.prepared
        return Identity(
            incarnation=self.incarnation,
            rank=self.host.rank,
            world_size=self.host.world_size,
            device=self.host.device,
            gpu=uuid_of(torch.device(self.host.device)),
            host=host(),
            pid=os.getpid(),
            plan_signature=self.signature,
            prepared=prepared.manifest.version if prepared else None,
            holding=[prepared.manifest.location.address] if prepared else [],
            last_error=self.last_error,
            busy=self.lease.others(time.monotonic(), request.session),
            withdrawn=self.withdrawn,
        )

    def withdraw(self, why: str) -> None:
        super().withdraw(why)
        self.applier = self.signature = None  # the proof of layers held for other tensors

    def trace(self, request: Request) -> Any:
        wanted = decode(request.body, TraceRequest)
        self.lease.check(time.monotonic(), request.session)
        if wanted.signature != signature(wanted.tensors):
            raise PlanError("the list of tensors is not the one that was signed")
        same = wanted.signature == self.signature and self.state == "serving"
        if isinstance(self.host, AdapterHost):
            self.host.expect(wanted.tensors, wanted.config)
        elif same and (known := self.kept.known(wanted.signature)) is not None:  # traced for another trainer
            self._give_up()
            return known.plan
        plan = trace(self.host, wanted.tensors)
        self._give_up()
        self.applier, self.signature = self.kept.applier(self.host, wanted.signature, plan), wanted.signature
        self.expected, self.lists = Expected(wanted.tensors), Lists(wanted.signature, wanted.tensors)
        return plan

    def decide(self, request: Request) -> bool:
        """Looks at a part of the model (see `beforehand.py`). Returns whether all was looked at."""
        self.lease.check(time.monotonic(), request.session)
        return self.applier is None or self.state != "serving" or self.applier.decide(self.expected.tensors)

    def reserve(self, request: Request) -> None:
        """Takes the lease before the pause for a commit that also prepares its version."""
        self.lease.check(time.monotonic(), request.session)
        self.lease.take(time.monotonic(), request.session, decode(request.body, str), self.last.lease if self.last else RESERVED)

    def prepare(self, request: Request) -> Arrival:
        """Opens the version, and begins to fetch and prove its bytes beside the engine's steps."""
        reader = self._prepare(request.session, self.lists.decode(request.body))
        if isinstance(reader, Visible) and not reader.at_once:
            return Arrival(done=False)
        assert self.prepared is not None
        wait([self.prepared.arrival], 0.001)  # if nothing is moved before the commit this saves a call of `ready`
        return self.ready(request)

    def _prepare(self, session: str, wanted: PrepareRequest) -> Reader:
        manifest = wanted.manifest
        if wanted.left_at is not None and not self._is_as_left(wanted):
            raise VersionConflict("this worker is not as the trainer has left it")
        self.lease.check(time.monotonic(), session)
        check_merged(manifest.merged, [number for number, adapter in self.adapters.items() if adapter.version is not None])
        if self.applier is None or wanted.signature != self.signature:
            raise PlanError("the worker has no plan for these tensors: it was restarted, or the source changed. Push again")
        known = self.history.get(manifest.version)
        if known and manifest.digests and known != total(manifest.digests):
            raise VersionConflict(
                f"version {manifest.version!r} was served before, with other bytes", next_step="give each set of weights a name of its own"
            )
        if manifest.base is not None and manifest.base != self.version and self.state == "serving":
            raise VersionConflict(f"version {manifest.version!r} follows {manifest.base!r}, but the engine serves {self.version!r}")
        self.expected.check(manifest.tensors)
        self._give_up()
        listed = self.incarnation in wanted.workers  # not by rank: replicas of an engine each count from zero
        share = (wanted.workers.index(self.incarnation), len(wanted.workers)) if listed else (0, 1)
        reader = self.open_reader(manifest, WorkerContext(self.incarnation, wanted.timeout, self.host.device, share))
        arrival = arriving(manifest, reader, self.checker)
        self.prepared, self.last = Prepared(manifest, session, reader, arrival), wanted
        self.lease.take(time.monotonic(), session, manifest.version, wanted.lease)
        return reader

    def _prepare_again(self, session: str, version: str, again: Again) -> None:
        last = self.last
        if last is None or last.manifest.location.address != again.address:
            raise VersionConflict(f"what version {version!r} was to be prepared as is not what was prepared here last")
        location = structs.replace(last.manifest.location, sending=again.sending)
        manifest = structs.replace(last.manifest, version=version, base=again.base, location=location, merged=again.merged)
        self._prepare(session, structs.replace(last, manifest=manifest, left_at=again.left_at))

    def _is_as_left(self, wanted: PrepareRequest) -> bool:
        known = self.incarnation in wanted.workers and self.applier is not None and wanted.signature == self.signature
        return known and self.version == wanted.left_at and self.state == "serving"

    def ready(self, request: Request) -> Arrival:
        """Returns whether the opened bytes have arrived. Raises, and forgets them, on failure."""
        prepared = self.prepared
        if prepared is None or prepared.session != request.session:
            raise VersionConflict("nothing is prepared here")
        if not prepared.arrival.done():
            return Arrival(done=False)
        if (error := prepared.arrival.exception()) is not None:
            self._give_up()
            raise error
        found, tensors = prepared.arrival.result()[1], prepared.manifest.tensors
        if prepared.reader.split:
            return Arrival(done=True, parts=vector(found, tensors))
        return Arrival(done=True, digests=b"" if prepared.manifest.digests else vector(found, tensors))

    def commit(self, request: Request) -> WorkerReceipt:
        """Between two engine steps: copies, rebuilds derived state, proves, and takes the version.

        A version that only the trainer can prove is served, under its label, after `accept`.
        """
        wanted = decode(request.body, CommitRequest)
        if wanted.again is not None:
            self._prepare_again(request.session, wanted.version, wanted.again)
        prepared, applier = self.prepared, self.applier
        if prepared is None or applier is None or prepared.manifest.version != wanted.version or prepared.session != request.session:
            raise VersionConflict(f"version {wanted.version!r} is not prepared here")
        manifest, reader, (arrived, digests) = prepared.manifest, prepared.reader, prepared.arrival.result()
        arrival = arrive(manifest, reader, wanted.launch, self.last.wholes if self.last else ())
        if self.state == "dirty":
            applier = self.applier = self.kept.anew(applier)
        started, compared = time.perf_counter(), applier.compared
        self.writes()
        try:
            with torch.no_grad():
                applier.apply(arrival)
                sums = self.expected.sums(wanted.digests)  # this and the next line run while the GPU copies
                layers = applier.told()
                arrival.settle()
                applied = time.perf_counter()
                proof = arrival.prove(applier)
        except InstepError:
            raise
        except Exception as error:
            raise ApplyError(f"the engine's loader failed: {type(error).__name__}: {error}") from error
        finally:
            arrival.forget()
            released = self._drop()
            self.lease.committed(time.monotonic(), hold=wanted.hold)
        if not released:
            raise ApplyError("the engine's loader kept views of the published bytes, which the next version will overwrite")
        done = time.perf_counter()
        proved = proof.proves(sums)
        told = not proved or self.host.world_size > 1  # to be added up with other workers'
        known = manifest.digests or digests
        self.wrote(Taken(request.session, manifest.version, total(known) if known else None, manifest.merged), proved=proved)
        seconds = {"arrive": arrived, "apply": applied - started, "read_back": done - applied}
        if applier.compared is not None and applier.compared is not compared:
            seconds["initial"] = applier.compared.seconds
        return WorkerReceipt(self.host.rank, seconds, read_back=proof.tensors, proved=proved, **layers, **(proof.sums() if told else {}))

    def abort(self, request: Request) -> None:
        """Forgets what this trainer prepared. Safe to repeat; a dirty worker stays dirty."""
        self.lease.call_off(request.session, request.seq)
        if self.lease.session == request.session:
            self._give_up()

    def digest(self, request: Request) -> Held:
        """Sums up live storage, for tensors that need not be those of the plan. Changes nothing."""
        wanted = decode(request.body, DigestRequest)
        if wanted.signature != signature(wanted.tensors):
            raise PlanError("the list of tensors is not the one that was signed")
        return held(self.host, self.applier if wanted.signature == self.signature else None, wanted)

    def _give_up(self) -> None:
        self.lease.end()
        self._drop()

    def _drop(self) -> bool:
        """Closes what was prepared. Returns False if something still refers to its bytes."""
        prepared, self.prepared = self.prepared, None
        if prepared is None:
            return True
        prepared.reader.stop()
        wait([prepared.arrival])  # its thread reads these bytes
        if prepared.reader.close():
            return True
        gc.collect()  # an exception's frames and modules' cycles may hold views for a while
        return prepared.reader.close()
