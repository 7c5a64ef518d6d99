"""The steps of a push, in the order in which `sync.py` takes them. Each takes what the one before
it gave.

An `Attempt` goes through them. Where engines turn it down and keep their weights, `sync.py` makes
the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from instep.attempt import Attempt, Done, Ready, TurnedDown
from instep.digest import total
from instep.engine.advice import trace
from instep.engine.fused_commit import fused
from instep.engine.member import Member
from instep.errors import CanaryError, InstepError, SourceError, SyncError, TransportError, VersionConflict
from instep.plan.dtypes import common
from instep.plan.routes import check_metadata, signature
from instep.plan.sums import vector
from instep.protocol import CommitRequest, Manifest, TensorMeta
from instep.receipt import EngineReceipt, Receipt
from instep.session import Sent, Session
from instep.source import Look, check_unchanged
from instep.telemetry import Account, Event
from instep.transport import Placed, at_rest


class Push(Account):
    """One push of one version. done: its receipt, once it has ended well."""

    def __init__(self, session: Session, version: str) -> None:
        super().__init__(version, session.sinks)
        self.session = session
        self.committing: Sent | None = None  # set when the commit begins: an engine may have it
        self.done: Receipt | None = None
        self.started = time.perf_counter()
        session.transport.begin()

    def describe(self, *, begun: bool) -> Look:
        """Refuses a version that was pushed before, then looks at the source's tensors and notes
        their list in the session. begun: whether the transport knows that a push begins.

        Raises `VersionConflict` for a version that was pushed before, `PlanError` for a list that
        makes no sense, and `SourceError` for a source that cannot be read.
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
            if not begun:
                session.transport.prefetch()
            found = session.source.look()
            tensors = found.metadata
            if tensors != session.described or not tensors:
                check_metadata(tensors)
                session.described, session.signature = list(tensors), signature(tensors)
                session.sizes = session.sizes_of(tensors)
        return found

    def trust(self, found: Look) -> Attempt | None:
        """Makes an attempt without asking, if each engine should be as the last push left it. If
        one refuses to prepare, values are read again. Returns None if one has to be asked."""
        session, members = self.session, self.session.fleet.members
        if session.config.require == "any" or session.source.once or not all(member.known(session.signature) for member in members):
            return None
        for member in members:
            member.trust()
        return Attempt("trusted", list(members), found)

    async def ask(self, *, silent: bool = False) -> Attempt:
        """Asks all engines what they serve. Raises where `require="all"` and one does not answer.
        silent: also those that hung."""
        with self.phase("connect"):
            await self.session.fleet.hello(every=self.session.config.require == "all", silent=silent)
        self.session.fleet.check_apart()
        return Attempt("asked", self._remaining(self.session.fleet.members))

    async def plan(self, attempt: Attempt, tensors: list[TensorMeta], *, keep_dtypes: bool = False) -> tuple[Attempt, list[TensorMeta]]:
        """Proves for each engine that the tensors fill it, unless it was planned for their list
        before.

        keep_dtypes: whether the tensors have the dtypes of an earlier version. Returns who remains,
        and the tensors as they are to be sent.
        """
        members = attempt.members
        with self.phase("plan"):
            session, wanted = self.session, self.session.signature_of(tensors)
            cast, whole = session.config.cast, session.source.whole
            new = [member for member in members if not member.planned(wanted)]
            await session.fleet.each(new, lambda m: trace(m, tensors, wanted, session.source.within(), cast=cast, whole=whole))
        members = self._remaining(members)
        casts = common([*([{}] if keep_dtypes else []), *(member.plan.casts for member in members if member.plan)], tensors)
        if casts:
            tensors = [TensorMeta(t.name, casts.get(t.alias_of or t.name, t.dtype), t.shape, t.alias_of) for t in tensors]
        return replace(attempt, members=members), tensors

    def publish(self, attempt: Attempt, tensors: list[TensorMeta], base: str | None, required: Mapping[str, int] | None = None) -> Sent:
        """Makes the source's weights available to the engines' workers. required: the digests of a
        version that was pushed before.

        Raises `SourceError` where the trainer changed a tensor meanwhile, or has no forward for the
        canary: nothing has been sent.
        """
        session, expected = self.session, self._expected()
        with self.phase("publish"):
            session.free_left_versions(stays=required is not None)
            workers = [worker for member in attempt.members for worker in member.workers]
            found, source, device = attempt.found, session.source, session.source.device
            stamp, place = (found.stamp, found.place) if found else (source.stamp(), None)
            sizes = session.sizes_of(tensors)
            nbytes = sum(sizes.values())
            read = self.progress(nbytes)
            values = Placed(lambda: self._counted(sizes, device, read), source.again, source.stays, place, required, read)
            published = session.transport.publish(tensors, values, device, workers)
            if not published.location.live:  # live bytes are not copied yet: their digests are compared in the commit
                check_unchanged(source, stamp)
        listed, sums = session.signature_of(tensors), vector(published.digests, tensors)
        manifest = Manifest(self.version, base, tensors, published.digests, published.location, source.merged, listed, sums, nbytes)
        return Sent(manifest, published, stamp, expected, session.transport.finish, required)

    def _expected(self) -> list[float] | None:
        """Returns the trainer's log-probabilities of the canary; None without a canary."""
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

    def fuse(self, attempt: Attempt, sent: Sent) -> Ready | None:
        """Leaves the preparation to the commit for a single trusted engine whose bytes lie where it
        found the last ones: there is no other engine to hold back. Returns None for others."""
        first, *others = attempt.members
        fits = not others and first.finds_where_it_was(sent.manifest) and fused(first.engine) is not None
        return Ready(attempt.members, fused=True) if fits and self.session.transport.digests_apart else None

    async def prepare(self, attempt: Attempt, sent: Sent) -> Ready | TurnedDown:
        """Every engine checks names, base and bytes; nothing visible changes. With `require="all"`
        one failure aborts all."""
        members, transport = attempt.members, self.session.transport
        transport.use(sent.manifest.location.transport)
        failure = await self._prepare(members, sent)
        if attempt.name == "trusted" and any(isinstance(member.failure, VersionConflict) for member in members):
            return TurnedDown("not as left")
        if isinstance(failure, TransportError) and transport.give_up(failure, [member.failure for member in members]):
            for member in members:
                member.failure = None
            return TurnedDown("not reached")
        if failure is not None:
            raise failure
        transport.reached()
        return Ready([member for member in members if member.failure is None], fused=False)

    async def _prepare(self, members: Sequence[Member], sent: Sent) -> InstepError | None:
        fleet, transport = self.session.fleet, self.session.transport
        try:
            with self.phase("prepare"):
                async with transport.serving("prepare") as sending:
                    await fleet.each(members, lambda member: sending.abort_on_failure(member.prepare(sent.manifest, sent.digests)))
            self._remaining(members)
        except InstepError as error:
            await fleet.withdraw(members)
            return error
        await fleet.withdraw([member for member in members if member.failure])  # some of its workers may have prepared the version
        return None

    async def commit(self, ready: Ready, sent: Sent) -> Done | TurnedDown:
        """Commits on each engine between two of its steps. Raises where `require="all"` and one
        does not serve the new version afterwards. A fused commit that changed nothing is turned
        down."""
        members = ready.members
        done = await self._commit(members, sent)
        if ready.fused and members[0].failure and members[0].serving == "old":
            return TurnedDown("not as left")
        if done:
            self.session.keep(sent)
        self._remaining(members)
        return Done(done)

    async def _commit(self, members: Sequence[Member], sent: Sent) -> dict[str, EngineReceipt]:
        session = self.session
        if sent.required is not None and session.transport.digests_before_commit:
            sent.digests()  # raises before any label changes, if bytes that were published again differ
        self.committing = sent
        with self.phase("commit"):
            carried = sent.manifest.location.live and not session.transport.digests_apart
            request = CommitRequest(self.version, sent.digests() if carried else {}, sent.published.launch, hold=True)
            async with session.transport.serving("commit") as sending:
                return await session.fleet.each(
                    members,
                    lambda member: sending.abort_on_failure(member.commit(sent.manifest, request, session.config.caches, sent.digests)),
                )

    async def break_off(self) -> None:
        """Cleans up after a push that failed or was cancelled: engines go on or refuse, and their
        leases end."""
        fleet, sent = self.session.fleet, self.committing
        await fleet.settle(self.version)
        if sent is not None and any(member.has(self.version) for member in fleet.members):
            self.session.keep(sent)

    async def receipt(self, done: Done, sent: Sent) -> Receipt:
        """Makes the receipt. Raises `CanaryError` where engines fail the canary, which refuse to
        generate from then on."""
        session, engines = self.session, done.engines
        gap = await self._canary([member for member in session.fleet.members if member.name in engines], sent.expected)
        session.fleet.ask_again()
        self.seconds["total"] = time.perf_counter() - self.started
        sizes = session.sizes_of(sent.manifest.tensors)
        self.done = receipt = Receipt(
            version=self.version,
            nbytes=sent.manifest.nbytes,
            tensors=len(sizes),
            seconds=self.seconds,
            digest=total(sent.digests()),
            engines=tuple(engines[m.name] for m in session.fleet.members if m.name in engines and not m.failure),
            canary_gap=gap,
            non_finite=sent.finished.non_finite,
            failed=tuple(member.state() for member in session.fleet.members if member.failure),
            transport=sent.manifest.location.transport,
            why=session.transport.against,
        )
        self.tell(Event("done", self.version, receipt=receipt))
        return receipt

    async def _canary(self, members: Sequence[Member], expected: list[float] | None) -> float | None:
        session = self.session
        if not session.config.canary or expected is None:
            return None
        tokens = list(session.config.canary)
        with self.phase("canary"):
            scores = await session.fleet.each(members, lambda m: m.bounded("canary", m.engine.score(tokens)))
        members = self._remaining(members)
        gaps = {name: float((torch.tensor(score) - torch.tensor(expected)).abs().max()) for name, score in scores.items()}
        bound = session.config.canary_bound
        bad = [member for member in members if not gaps[member.name] <= bound]  # so that a NaN fails too
        for member in bad:
            text = f"log-probabilities differ from the trainer's by up to {gaps[member.name]:.3g}, the bound is {bound:g}"
            member.failure = CanaryError(f"{member.name} computes something else than the trainer: {text}")
            await member.condemn(text)
        return max((gaps[member.name] for member in self._remaining(members)), default=None)

    def _remaining(self, members: Sequence[Member]) -> list[Member]:
        """Returns members without a failure. Raises one if all are required or none is left."""
        failed = [member for member in members if member.failure is not None]
        first = next((m.failure for m in failed if not isinstance(m.failure, SyncError)), failed[0].failure if failed else None)
        if first is None:
            return list(members)
        if self.session.config.require == "any" and len(failed) < len(members):
            return [member for member in members if member.failure is None]
        if isinstance(first, SyncError):
            first.version, first.engines = self.version, self.session.fleet.states()
        raise first

    def _counted(self, of: Mapping[str, int], device: torch.device, read: Callable[[int], None]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the source's tensors, and tells how far it is. of: the bytes of each."""
        at_rest(device)  # every stream of it: merged adapters are computed on the way
        for name, value in self.session.source.tensors():
            yield name, value
            read(of.get(name, 0))
