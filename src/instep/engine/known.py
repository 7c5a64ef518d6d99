"""State that a trainer keeps of one engine, to use without asking it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from instep.engine import Engine
from instep.errors import EngineLost, EngineState, InstepError, Serving
from instep.faults import error_of
from instep.plan.routes import Plan
from instep.protocol import AdapterConfig, Identity, Manifest, Method, Reply, Request, Withdrawn, decode, encode, raw

T = TypeVar("T")
HURRY = 1.0  # seconds for an engine that has let a deadline pass already
LATE = "a commit did not answer in time: it is not known which weights are in place"


@dataclass
class Known:
    """One engine, and what the trainer last heard of it."""

    engine: Engine
    session: str
    timeout: float
    adapter: AdapterConfig | None = None  # what is pushed, where it is not the model
    seq: int = 0
    version: str | None = None
    serving: Serving = "old"
    incarnation: str | None = None
    pushed: str | None = None
    """The version that this trainer last brought it, within its current incarnation."""
    attempted: set[str] = field(default_factory=set)
    """What this trainer told it to commit: a commit may succeed after its deadline."""
    condemned: str | None = None
    """Why it refuses to generate."""
    plan: Plan | None = None
    listed: str = ""
    """The signature of the last list of tensors that its workers were given with a version, since
    they were asked who they are."""
    holding: set[str] = field(default_factory=set)
    """Publications that its workers may still read."""
    address: str | None = None  # of the publication that it was asked to prepare last
    workers: list[Identity] = field(default_factory=list)
    failure: InstepError | None = None
    phase: str | None = None
    withdrawn: Withdrawn | None = None
    trusted: bool = False  # not asked what it serves now
    _hurried: bool = False
    given: Any = None  # what the user has listed
    under_way: bool = False  # a commit has begun, and has not ended in one way or another

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def patience(self) -> float:
        """Seconds that the engine may take for each answer."""
        return min(self.timeout, HURRY) if self._hurried else self.timeout

    @contextmanager
    def hurried(self, *, when: bool = True) -> Iterator[None]:
        """Shortens the wait for an engine that has let a deadline pass already."""
        before, self._hurried = self._hurried, when
        try:
            yield
        finally:
            self._hurried = before

    def is_given(self, engine: Any) -> bool:
        """Whether a user means this engine by `engine`."""
        both = isinstance(engine, str) and isinstance(self.given, str)
        return engine is self.given or (both and engine.rstrip("/") == self.given.rstrip("/"))

    def shares_workers(self, other: Known) -> bool:
        mine = {worker.incarnation for worker in self.workers}
        return not mine.isdisjoint(worker.incarnation for worker in other.workers)

    def state(self) -> EngineState:
        failure = self.failure.args[0] if self.failure else None
        withdrawn = self.withdrawn.why if self.withdrawn and self.version is None else None
        return EngineState(self.name, self.serving, self.version, self.phase if failure else None, failure, withdrawn)

    def behind(self, version: str) -> bool:
        return self.version != version or self.serving != "old"

    def has(self, version: str) -> bool:
        """Whether the engine serves this version, as far as this trainer knows."""
        return self.version == version and self.serving in ("old", "new")

    def planned(self, signature: str) -> bool:
        """Whether there is a plan for tensors with this signature."""
        return self.plan is not None and self.plan.signature == signature

    def known(self, signature: str) -> bool:
        """Whether the engine is as this trainer's last push has left it, and has a plan, as far
        as one can tell without asking."""
        left = self.serving == "new" and self.version == self.pushed and not self.holding
        return left and self.failure is None and self.condemned is None and self.planned(signature)

    def trust(self) -> None:
        """Takes the place of `hello` for an engine that is `known`."""
        self.trusted, self.serving = True, "old"

    def finds_where_it_was(self, manifest: Manifest) -> bool:
        """Whether the engine is still trusted, and finds these bytes where it found the last
        ones."""
        return self.trusted and self.address == manifest.location.address

    def _short(self, manifest: Manifest) -> Manifest:
        """Returns a manifest as it travels: without the list that the workers have already."""
        has = manifest.listed and manifest.listed in (self.listed, self.plan.signature if self.plan else "")
        digests = {} if manifest.sums else manifest.digests
        return structs.replace(manifest, tensors=[] if has else manifest.tensors, digests=digests)

    def _request(self, body: Any) -> bytes:
        self.seq += 1
        return encode(Request(self.seq, self.session, raw(body), self.adapter.number if self.adapter else 0))

    def _told(self, method: Method, kind: type[T], answers: Sequence[bytes]) -> list[T]:
        """Decodes the workers' answers and notes what they say. Raises as `call` does."""
        try:
            replies = sorted((decode(data, Reply) for data in answers), key=lambda reply: reply.rank)
            if not replies or any(reply.seq != self.seq for reply in replies):
                raise EngineLost(f"{self.name} answered {method} out of step: its workers lost count of its requests")
            self._note(replies)
            return [decode(reply.body, kind) for reply in replies]
        except (msgspec.DecodeError, TypeError, EngineLost) as error:
            self.serving = "unknown"
            raise error if isinstance(error, EngineLost) else EngineLost(f"{self.name} sent no valid reply to {method}: {error}") from error

    def _note(self, replies: Sequence[Reply]) -> None:
        """Notes from the workers' replies what the engine serves. Raises the first fault among
        them."""
        self.trusted = False
        versions = {reply.version for reply in replies}
        mixed = (self.condemned not in (None, LATE)) or len(versions) > 1 or any(reply.state != "serving" for reply in replies)
        self.serving, self.version = ("dirty", self.version) if mixed else ("old", replies[0].version)
        for reply in replies:
            if reply.fault is not None:
                where = f"{self.name} rank {reply.rank}" if len(replies) > 1 else self.name
                raise error_of(reply.fault, f"{where}: ")
