"""One engine as a trainer knows it: one request to all its workers, every wait bounded, and what is
known of it after any answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import structs

from instep.engine import UNLABELLED, CachePolicy
from instep.engine.fused_commit import fused, goes_on
from instep.engine.known import LATE, Known
from instep.errors import (
    ApplyError,
    EngineBusy,
    EngineLost,
    EngineTimeout,
    InstepError,
    SyncError,
    VersionConflict,
)
from instep.plan.routes import prove
from instep.plan.sums import check_arrivals, check_sums
from instep.protocol import (
    Again,
    Arrival,
    CommitRequest,
    Identity,
    Manifest,
    Method,
    PrepareRequest,
    TensorMeta,
    TraceRequest,
    WorkerPlan,
    WorkerReceipt,
)
from instep.receipt import EngineReceipt

T = TypeVar("T")
Digests = Callable[[], dict[str, int]]
POLL, SELDOM = 0.003, 0.1
"""Seconds between two questions whether bytes have arrived: a tenth of the time that they take,
within these."""


class Member(Known):
    """One engine, with the requests that a trainer sends to it."""

    async def bounded(self, phase: str, action: Awaitable[T]) -> T:
        """Waits for an engine no longer than its patience. An exception that is not instep's
        becomes an `EngineLost`: nobody knows how far the engine came."""
        self.phase = phase
        try:
            async with asyncio.timeout(self.patience):
                return await action
        except TimeoutError as error:
            self.phase, self.serving = phase, "unknown"
            why = f": {error}" if error.args else ""
            raise EngineTimeout(f"{self.name} did not answer {phase} within {self.patience:g} s{why}") from None
        except EngineLost:
            self.serving, self.incarnation, self.plan = "unknown", None, None
            self.holding.clear()
            raise
        except InstepError:
            raise
        except Exception as error:
            self.serving = "unknown"
            raise EngineLost(f"{self.name} failed in {phase}: {type(error).__name__}: {error}") from error

    async def call(self, method: Method, kind: type[T], body: Any = None) -> list[T]:
        """Asks all workers. Returns one answer per worker, in rank order.

        Raises `EngineTimeout`, `EngineLost`, or the first worker's fault as the error that it
        names.
        """
        phase = "prepare" if method == "ready" else method  # `ready` asks how far `prepare` is
        return self._told(method, kind, await self.bounded(phase, self.engine.call(method, self._request(body))))

    async def hello(self) -> list[Identity]:
        """Asks the workers who they are and what they serve. Raises `VersionConflict` if another
        trainer has pushed in between."""
        if self.condemned == LATE:
            await self.abort()  # a commit that is still on its way finds nothing to commit
        found = await self.call("hello", Identity)
        if sorted(identity.rank for identity in found) != list(range(found[0].world_size)):
            raise EngineLost(f"{self.name} has {found[0].world_size} workers, {len(found)} answered")
        incarnation = ",".join(identity.incarnation for identity in found)
        if incarnation != self.incarnation:
            self.incarnation, self.pushed, self.plan = incarnation, None, None
            self.attempted.clear()
        self.withdrawn = next((identity.withdrawn for identity in found if identity.withdrawn), None)
        if self.withdrawn and self.version is None:
            self.pushed = None
            await self.bounded("label", self.engine.label(UNLABELLED))
        if self.serving == "old" and self.version in self.attempted:
            self.pushed = self.version
        self.attempted &= {self.version or ""}  # of an earlier one nothing is on its way any more
        busy = any(identity.busy for identity in found)  # whoever pushes now will have it go on
        if self.serving == "old" and self.condemned == LATE and not busy:
            # Whether or not that commit has worked, it holds one whole version.
            if self.version is not None:
                await self.bounded("label", self.engine.label(self.version))
            await self.accept()
        if self.pushed is not None and self.version != self.pushed and self.serving == "old":
            raise VersionConflict(
                f"{self.name} serves {self.version!r}, this trainer left it at {self.pushed!r}: another trainer pushes to it",
                next_step="stop the other trainer, or make a new WeightSync to take over (in vLLM's phases: init_weight_transfer_engine)",
            )
        if self.plan and any(identity.plan_signature != self.plan.signature for identity in found):
            self.plan = None
        self.holding, self.listed = {address for identity in found for address in identity.holding}, ""
        self.workers = found
        return found

    async def condemn(self, reason: str) -> None:
        """Has the engine refuse to generate until a push heals it."""
        phase, silent = self.phase, self.serving == "unknown"
        self.serving, self.condemned = "dirty", reason
        with suppress(InstepError), self.hurried(when=silent):  # the error that led here is the one to tell
            await self.bounded("refuse", self.engine.refuse(reason))
        self.serving, self.phase = "dirty", phase

    async def accept(self) -> None:
        await self.bounded("resume", self.engine.resume())
        await self._uncover()

    async def _uncover(self) -> None:
        await self.bounded("resume", self.engine.refuse(None))
        self.condemned = None

    async def trace(self, tensors: list[TensorMeta], signature: str, *, cast: bool, whole: bool = False) -> None:
        config = self.adapter.config if self.adapter else ""
        workers = await self.call("trace", WorkerPlan, TraceRequest(tensors, signature, config))
        self.plan = prove(self.name, tensors, workers, cast=cast, whole=whole)
        while not all(await self.call("decide", bool)):  # between steps of the engine
            pass

    async def prepare(self, manifest: Manifest, digests: Digests) -> None:
        """Has the workers prepare a version. digests: the trainer's, where the manifest does not
        have them yet."""
        arrivals = await self.call("prepare", Arrival, self._to_prepare(manifest))
        self.listed = manifest.listed
        if not all(arrival.done for arrival in arrivals):
            arrivals = await self.bounded("prepare", self._arrived())
        check_arrivals(self.name, manifest.tensors, digests, arrivals)

    def _to_prepare(self, manifest: Manifest) -> PrepareRequest:
        self.address = manifest.location.address
        self.holding.add(self.address)
        workers = [worker.incarnation for worker in self.workers]
        signature = self.plan.signature if self.plan else ""
        wholes = sorted(self.plan.wholes) if self.plan else []
        left_at = self.version if self.trusted else None
        return PrepareRequest(self._short(manifest), signature, 4 * self.timeout, self.timeout, workers, left_at, wholes)

    async def _arrived(self) -> list[Arrival]:
        """Polls until the bytes have arrived. Workers fetch and digest in threads of their own,
        while generation goes on."""
        started = time.perf_counter()
        while True:
            arrivals = await self.call("ready", Arrival)
            if all(arrival.done for arrival in arrivals):
                return arrivals
            await asyncio.sleep(min(max(POLL, (time.perf_counter() - started) / 10), SELDOM))

    async def abort(self) -> None:
        await self.call("abort", type(None))
        self.holding.clear()

    async def _let_go(self) -> None:
        """Ends this trainer's lease, after the last request of a commit. If that request fails,
        the lease ends at its own deadline."""
        with suppress(InstepError):
            await self.bounded("abort", self.engine.call("abort", self._request(None)))

    async def alive(self) -> None:
        """Shows the engine that its trainer lives. A missing answer is not counted as a failure."""
        with suppress(Exception):
            async with asyncio.timeout(self.timeout):
                await self.engine.call("status", self._request(None))

    async def commit(self, manifest: Manifest, request: CommitRequest, caches: CachePolicy, digests: Digests) -> EngineReceipt:
        """Pauses, commits, labels, resumes. An engine that ends up dirty stays paused and refuses
        to generate.

        One that is trusted still, because nothing was asked of it in this push, is prepared in the
        same call where it can be.
        """
        started = time.perf_counter()
        self.attempted.add(manifest.version)
        before, self.condemned = self.condemned, self.condemned or LATE  # until its end is known
        self.under_way = True
        try:
            receipts, on = await self._commit(manifest, request, caches, digests)
            if not on:
                await self._prove(manifest, receipts, digests)
            self.serving, self.version, self.pushed, self.holding = "new", manifest.version, manifest.version, set()
            self.condemned = LATE  # and healed: whatever it was condemned for is over
            if not on:
                await self.bounded("label", self.engine.label(manifest.version))
                await self.bounded("resume", self.engine.resume())
            await self._uncover()
            paused = time.perf_counter() - started  # it may work on a long step before it answers again
            if request.hold and not on:
                await self._let_go()
        except InstepError as error:
            if isinstance(error, EngineBusy) and self.serving == "old":
                # Nothing was done: whoever pushes has paused it, or will.
                self.condemned = before
                self.holding.discard(manifest.location.address)
                await self._let_go()
            else:
                await self._after_failed_commit(manifest, error, hold=request.hold)
            self.under_way = False
            if isinstance(error, SyncError):
                raise
            told = vars(error).get("next_step")  # a class's own may not hold any more
            raise SyncError(str(error.args[0]), tensor=error.tensor, next_step=told) from error
        self.under_way = False
        return EngineReceipt.of(self.name, paused, receipts)

    async def _commit(
        self, manifest: Manifest, request: CommitRequest, caches: CachePolicy, digests: Digests
    ) -> tuple[list[WorkerReceipt], bool]:
        """Returns the workers' receipts, and whether the engine has already been resumed."""
        if (engine := fused(self.engine)) is not None:
            whole = request
            if self.finds_where_it_was(manifest):
                self.holding.add(manifest.location.address)
                whole = structs.replace(request, again=Again.of(manifest, self.version))
            answers = await self.bounded("commit", engine.commit_at_once(self._request(whole), caches, request.version))
            if answers is not None:
                receipts = self._told("commit", WorkerReceipt, answers)
                return receipts, goes_on(answers)
        if self.trusted:
            await self.prepare(manifest, digests)
        await self.bounded("pause", self.engine.pause(caches))
        return await self.call("commit", WorkerReceipt, request), False

    async def _prove(self, manifest: Manifest, receipts: Sequence[WorkerReceipt], digests: Digests) -> None:
        """Checks the sums that workers took while they pulled a version, and has them serve it."""
        summed = any(receipt.wholes or receipt.parts for receipt in receipts)
        try:
            if self.plan is not None and summed:
                check_sums(self.name, self.plan, manifest.tensors, digests(), receipts)
        except InstepError:  # also where the trainer has no digests: the worker has taken what nobody proves
            self.serving = "dirty"
            raise
        if all(receipt.proved for receipt in receipts):
            return
        if not summed:
            raise ApplyError(f"{self.name}: its workers tell nothing by which {manifest.version} could be proved")
        await self.call("accept", type(None), manifest.version)

    async def _after_failed_commit(self, manifest: Manifest, error: InstepError, *, hold: bool) -> None:
        """An engine that still serves the old version goes on; one that may not be whole must not
        generate."""
        phase = self.phase
        if self.serving == "old":
            self.holding.discard(manifest.location.address)
            with suppress(InstepError):  # the first error is the one to tell
                await self.accept()
        if self.serving != "old":
            late = self.serving == "unknown"
            await self.condemn(LATE if late else f"{phase} of {manifest.version}: {error.args[0]}")
            self.serving = "unknown" if late else "dirty"
        if self.serving != "unknown" and hold:
            await self._let_go()
        self.phase = phase

    def unsettled(self) -> bool:
        """Whether the engine was left in the middle of a commit, or with a version that its
        workers have prepared."""
        return self.under_way or bool(self.holding and self.failure is None)

    async def settle(self, version: str, limit: float) -> None:
        """Settles the engine after a push of `version` was broken off, and ends its lease. The
        engine goes on with the whole version that it holds. It refuses if it holds none, or does
        not answer within `limit` seconds."""
        try:
            async with asyncio.timeout(limit):
                await self._settle(version)
        except Exception:  # it is asked again before anything else
            if self.under_way and self.condemned:
                self.serving = "unknown"
                await self.condemn(self.condemned or LATE)
                self.serving = "unknown"
        self.under_way = False

    async def _settle(self, version: str) -> None:
        await self.abort()  # what is on its way changes nothing any more
        if self.condemned not in (None, LATE):  # a push was to heal it, or it was about to be told
            await self.condemn(self.condemned)
        elif self.under_way and not any(identity.busy for identity in await self.hello()) and self.condemned:
            await self.condemn(f"the push of {version} was broken off in its commit")
