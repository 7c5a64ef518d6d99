"""The steps of a push, in the order in which `sync.py` takes them. Each takes what the one before it gave."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from instep.digest import total
from instep.engine.advice import trace
from instep.engine.at_once import AtOnce
from instep.engine.member import Member
from instep.errors import CanaryError, InstepError, SourceError, SyncError, TransportError, VersionConflict
from instep.plan.dtypes import common
from instep.plan.routes import check_metadata, signature
from instep.protocol import CommitRequest, Manifest, TensorMeta
from instep.receipt import EngineReceipt, Receipt
from instep.session import Session, check_same
from instep.source import Look, check_unchanged
from instep.telemetry import Account, Event
from instep.transport import Placed, at_rest


class Push(Account):
    """One push of one version."""

    def __init__(self, session: Session, version: str) -> None:
        super().__init__(version, session.sinks)
        self.session = session
        # Of the current version, until another is published.
        self.published, self.expected, self.stamp = session.published, session.expected, session.stamp
        self.finished = session.published if session.digests else None  # `published`, once it has its digests
        self.must: dict[str, int] | None = None  # the digests, where it is a version that was pushed before
        self.look: Look | None = None  # at the source, of this moment: nothing was waited for since
        self.trusting = False  # the engines are taken to be as the last push has left them
        self.alone = False  # a single one is prepared in the commit
        self.committing: Manifest | None = None  # an engine may have it
        self.done: Receipt | None = None
        self.started = time.perf_counter()
        session.transport.begin()

    def describe(self) -> list[TensorMeta]:
        """The source's tensors.

        Raises `VersionConflict` for a version that was pushed before, `PlanError` for a list that makes no sense.
        """
        session = self.session
        if (number := session.history.get(self.version)) is not None:
            age = session.pushes - number
            raise VersionConflict(
                f"version {self.version!r} was pushed before"
                + (f", {age} version{'s' * (age > 1)} ago" if age else ": it is the current one"),
                next_step="give each set of weights a name of its own; `catch_up()` brings the current version to engines that lack it",
            )
        with self.phase("describe"):
            session.transport.hasten()
            self.look = session.source.look()
            tensors = self.look.metadata
            if tensors != session.described or not tensors:
                check_metadata(tensors)
                session.described, session.signature = list(tensors), signature(tensors)
                session.sizes = session.sizes_of(tensors)
        return session.described

    async def connect(self) -> list[Member]:
        """The engines that answer. Raises where `require="all"` and one does not.

        Those that are as this trainer's last push has left them, so far as it knows, are not asked: they refuse to prepare if they are not.
        """
        session, members = self.session, self.session.fleet.members
        if self.look is not None and session.config.require == "all" and all(member.known(session.signature) for member in members):
            for member in members:
                member.trust()
            self.trusting = True
            return list(members)
        self.look, self.trusting = None, False
        with self.phase("connect"):
            await session.fleet.hello(hurry=session.config.require == "any")
        session.fleet.check_apart()
        return self._remaining(members)

    async def plan(self, members: Sequence[Member], tensors: list[TensorMeta], *, sent: bool = False) -> list[TensorMeta]:
        """Proves for each engine that the tensors fill it, the first time that it sees their list. Returns them with the dtypes to send.

        sent: whether they have those of a version that was sent already.
        """
        with self.phase("plan"):
            session = self.session
            wanted = session.signature if tensors is session.described else signature(tensors)
            cast, whole = session.config.cast, session.source.whole
            new = [member for member in members if not member.planned(wanted)]
            await session.fleet.each(new, lambda m: trace(m, tensors, wanted, session.source.within(), cast=cast, whole=whole))
        self._remaining(members)
        engines = [member.plan.casts for member in members if member.plan]
        casts = common([{}, *engines] if sent else engines, tensors)
        if not casts:
            return tensors
        return [TensorMeta(t.name, casts.get(t.alias_of or t.name, t.dtype), t.shape, t.alias_of) for t in tensors]

    def publish(self, members: Sequence[Member], tensors: list[TensorMeta], base: str | None) -> Manifest:
        """Makes the source's weights available to the members' workers.

        Raises `SourceError` where the trainer changed a tensor meanwhile, or has no forward for the canary: nothing has been sent.
        """
        session = self.session
        self.expected = self._expected()
        with self.phase("publish"):
            session.free_left_versions()
            workers = [worker for member in members for worker in member.workers]
            look, self.look = self.look, None
            self.stamp = look.stamp if look else session.source.stamp()
            source, device = session.source, session.source.device
            place = look.place if look else None
            values = Placed(lambda: self._counted(tensors, device), source.again, source.stays, place, self.must)
            self.published = session.transport.publish(tensors, values, device, workers)
            if not self.published.location.live:  # of what is only read in the commit nothing was copied yet: digests prove it there
                check_unchanged(session.source, self.stamp)
        published = self.published
        return Manifest(self.version, base, tensors, published.digests, published.location, session.source.merged)

    def _expected(self) -> list[float] | None:
        """What the trainer's forward says of the canary."""
        session = self.session
        if not session.config.canary:
            return None
        with self.phase("canary"):
            scores = session.source.score(list(session.config.canary))
        if scores is None:
            raise SourceError(
                "the source has no forward that scores the canary: only a language model has",
                next_step="give the nn.Module itself as source, or leave `canary` out: digests prove the bytes",
            )
        return scores

    async def prepare(self, members: Sequence[Member], manifest: Manifest) -> tuple[list[Member], Manifest]:
        """Every engine checks names, base and bytes; nothing visible changes. With `require="all"` one failure aborts all.

        Where the transport does not get the version to an engine, the next one is tried: hence the manifest. A single engine that is
        known, and finds the bytes where it found them last, prepares them in the commit: no other engine depends on whether it can.
        """
        self.alone = self._alone(members, manifest)
        if self.alone:
            return list(members), manifest
        members = [member for member in members if member.failure is None]
        failure = await self._prepare(members, manifest)
        if self.trusting and any(isinstance(member.failure, VersionConflict) for member in members):
            members, manifest = await self._ask(manifest)
            failure = await self._prepare(members, manifest)
        transport = self.session.transport
        while isinstance(failure, TransportError) and transport.give_up(failure, [member.failure for member in members]):
            manifest = self.publish(members, manifest.tensors, manifest.base)
            failure = await self._prepare(members, manifest)
        if failure is not None:
            raise failure
        transport.reached()
        return [member for member in members if member.failure is None], manifest

    def _alone(self, members: Sequence[Member], manifest: Manifest) -> bool:
        known = len(members) == 1 and members[0].in_place(manifest)
        return known and self.session.transport.late and isinstance(members[0].engine, AtOnce)

    async def _ask(self, manifest: Manifest) -> tuple[list[Member], Manifest]:
        """Where an engine that was taken to be as it was left has refused: asks all, and publishes for them."""
        members = await self.connect()
        tensors = await self.plan(members, self.session.described)
        return members, self.publish(members, tensors, manifest.base)

    async def _prepare(self, members: Sequence[Member], manifest: Manifest) -> InstepError | None:
        fleet, transport = self.session.fleet, self.session.transport
        try:
            with self.phase("prepare"):
                async with transport.serving("prepare") as sending:
                    await fleet.each(members, lambda member: sending.unless(member.prepare(manifest, self.digests)))
            self._remaining(members)
        except InstepError as error:
            await fleet.withdraw(members)
            return error
        await fleet.withdraw([member for member in members if member.failure])  # of its workers some may have prepared it
        return None

    async def commit(self, members: Sequence[Member], manifest: Manifest) -> tuple[dict[str, EngineReceipt], Manifest]:
        """Each engine between two of its steps. Raises where `require="all"` and one does not serve the new version afterwards.

        Hence the manifest: an engine that was not prepared and has refused, with nothing lost, is asked why, as any other.
        """
        done = await self._commit(members, manifest)
        if self.alone and members[0].failure and members[0].serving == "old":
            members, manifest = await self.prepare(*await self._ask(manifest))
            done = await self._commit(members, manifest)
        if done:
            self._keep(manifest)
        self._remaining(members)
        return done, manifest

    async def _commit(self, members: Sequence[Member], manifest: Manifest) -> dict[str, EngineReceipt]:
        session, published = self.session, self.published
        assert published is not None
        self.committing = manifest
        with self.phase("commit"):
            request = CommitRequest(self.version, {} if session.transport.late else self.digests(), published.launch, hold=True)
            async with session.transport.serving("commit") as sending:
                return await session.fleet.each(
                    members, lambda member: sending.unless(member.commit(manifest, request, session.config.caches, self.digests))
                )

    def _keep(self, manifest: Manifest) -> None:
        """An engine serves this version: it is the current one."""
        session = self.session
        session.digests = {}
        with suppress(InstepError):  # the engine has proved the version by itself
            session.digests = self.digests()
        session.current, session.published = manifest, self.published
        session.stamp, session.expected = self.stamp, self.expected
        session.remember(self.version)

    async def break_off(self) -> None:
        """However a push ended before its end: engines go on or refuse, and their leases are over."""
        fleet, manifest = self.session.fleet, self.committing
        await fleet.settle(self.version)
        if manifest is not None and any(member.has(self.version) for member in fleet.members):
            self._keep(manifest)

    def digests(self) -> dict[str, int]:
        """Of what was published. On a GPU they are taken while the engines prepare and pull."""
        assert self.published is not None
        if self.finished is not self.published:
            self.published = self.finished = self.session.transport.finish(self.published)
        if self.must is not None:
            check_same(self.version, self.finished.digests, self.must)
        return self.finished.digests

    def confirm(self) -> None:
        """Before the label of a version that was published again. Raises `VersionConflict` where the trainer has others by now."""
        if self.must is not None and self.session.transport.early:
            self.digests()

    async def receipt(self, done: dict[str, EngineReceipt], manifest: Manifest) -> Receipt:
        """Asks the engines for the canary, and says what was done."""
        session = self.session
        gap = await self._canary([member for member in session.fleet.members if member.name in done])
        self.seconds["total"] = time.perf_counter() - self.started
        sent = self.session.sizes_of(manifest.tensors)
        self.done = receipt = Receipt(
            version=self.version,
            nbytes=sum(sent.values()),
            tensors=len(sent),
            seconds=self.seconds,
            digest=total(self.digests()),
            engines=tuple(done[member.name] for member in session.fleet.members if member.name in done and not member.failure),
            canary_gap=gap,
            non_finite=self.published.non_finite if self.published else (),
            failed=tuple(member.state() for member in session.fleet.members if member.failure),
            transport=manifest.location.transport,
            why=session.transport.against,
        )
        self.tell(Event("done", self.version, receipt=receipt))
        return receipt

    async def _canary(self, members: Sequence[Member]) -> float | None:
        session, expected = self.session, self.expected
        if not session.config.canary or expected is None:
            return None
        tokens = list(session.config.canary)
        with self.phase("canary"):
            scores = await session.fleet.each(members, lambda m: m.bounded("canary", m.engine.score(tokens)))
        members = self._remaining(members)
        gaps = {name: float((torch.tensor(score) - torch.tensor(expected)).abs().max()) for name, score in scores.items()}
        bound = session.config.canary_bound
        bad = [member for member in members if not gaps[member.name] <= bound]
        for member in bad:
            text = f"log-probabilities differ from the trainer's by up to {gaps[member.name]:.3g}, the bound is {bound:g}"
            member.failure = CanaryError(f"{member.name} computes something else than the trainer: {text}")
            await member.condemn(text)
        return max((gaps[member.name] for member in self._remaining(members)), default=None)

    def _remaining(self, members: Sequence[Member]) -> list[Member]:
        """The members that have not failed. Raises the failure where the config asks for all of them, or where none is left."""
        failed = [member for member in members if member.failure is not None]
        first = next((m.failure for m in failed if not isinstance(m.failure, SyncError)), failed[0].failure if failed else None)
        if first is None:
            return list(members)
        if self.session.config.require == "any" and len(failed) < len(members):
            return [member for member in members if member.failure is None]
        if isinstance(first, SyncError):
            first.version, first.engines = self.version, self.session.fleet.states()
        raise first

    def _counted(self, tensors: Sequence[TensorMeta], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The source's tensors. Tells of every hundredth of their bytes."""
        session, of = self.session, self.session.sizes_of(tensors)
        at_rest(device)  # also for what is computed on the way, such as merged adapters
        nbytes, told, everything = 0, 0, sum(of.values())
        for name, value in session.source.tensors():
            yield name, value
            nbytes += of.get(name, 0)
            if nbytes == everything or nbytes - told >= everything / 100:
                self.tell(Event("bytes", self.version, "publish", nbytes, everything))
                told = nbytes
