"""The commit of staged tensors by all workers of an engine together.

    trace, prove, prepare ──▶ commit
        │ anything missing or wrong      │ fails after the first write, in any worker
        ▼                                ▼
    old weights serve on           dirty: the model must not run until another commit succeeds

They are the calls that a trainer's push makes of a receiver. A worker alone can tell that all its
parameters are written; that each tensor is read completely, only all of them can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from msgspec import structs

from instep.dropin.communicator import nameless, sum_of
from instep.dropin.complete import Known, lacking, listed, needed, tied, twin, unread
from instep.engine.vllm.peers import Peers, as_instep
from instep.errors import InstepError, PlanError, by_name
from instep.plan.routes import Plan, check_metadata, prove, signature
from instep.protocol import (
    Arrival,
    CommitRequest,
    Location,
    Manifest,
    PrepareRequest,
    Reply,
    Request,
    TensorMeta,
    TraceRequest,
    WorkerPlan,
    WorkerReceipt,
    decode,
    encode,
    raw,
)
from instep.receiver.readback import read_back
from instep.receiver.state import Receiver
from instep.receiver.trace import trace
from instep.receiver.watcher import layer_of
from instep.transport.reader import Reader, Visible, WorkerContext

T = TypeVar("T")
First = Callable[[], Iterable[tuple[str, torch.Tensor]]]
STAGED = "staged"
ALL_ONCE = "send all tensors of the checkpoint that the engine loads once, then some alone"


@dataclass
class Stage:
    """Tensors in host memory, with their digests, taken when they came. `number` is the same in
    every worker."""

    number: int
    metas: dict[str, TensorMeta] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        self.metas, self.tensors, self.digests = {}, {}, {}

    def only(self, names: Collection[str], number: int) -> Stage:
        """Another stage, of some of these tensors."""
        return Stage(number, some(self.metas, names), some(self.tensors, names), some(self.digests, names))


def some(values: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    return {name: values[name] for name in names if name in values}


class StageReader(Visible):
    """A stage as a receiver reads it: nothing is left to fetch, and the bytes were compared with
    what the sender said when they came."""

    fetches = False

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        return {}

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        return self.stage.tensors[meta.name]


class Together:
    """One per worker. cast: whether tensors may be rounded to the dtype that the engine stores. A
    wider one is always taken."""

    def __init__(self, receiver: Receiver, peers: Peers, *, cast: bool) -> None:
        self.receiver, self.peers, self.cast = receiver, peers, cast
        self.seq = 0
        self.stage = Stage(0)
        self.plan: Plan | None = None
        self.aliases: dict[str, str] = {}
        self.last: Known = {}
        """The tensors that were committed last."""
        self.metas: dict[str, TensorMeta] = {}
        self.served: str | None = None
        """The version that they are of."""
        self.kept: dict[str, torch.Tensor] = {}
        """Those of them that cannot be read back from the layers that they are in."""
        self.halved: tuple[str | None, str] | None = None
        self.opened, receiver.open_reader = receiver.open_reader, self._open

    def commit(self, stage: Stage, version: str) -> WorkerReceipt:
        """Raises `PlanError` where something is missing, has no place, or has another shape or
        dtype: the old weights serve on.

        Raises whatever a commit raises: then `dirty()` says why the model must not run.
        """
        self.stage = stage
        try:
            manifest = self._prepared(version)
            receipt = self._commit(version)
        finally:
            self.stage = Stage(0)
        self.last = {meta.name: (meta, manifest.digests[meta.name]) for meta in manifest.tensors if not meta.alias_of}
        self.metas = {meta.name: meta for meta in manifest.tensors}
        self.served, self.kept = version, {name: stage.tensors[name] for name in self._packed()}
        self.halved = None
        return receipt

    def complete(self, stage: Stage, first: First | None = None) -> None:
        """Adds to some tensors all others of the version that the engine serves. first: brings its
        first weights, where it serves these.

        Raises `PlanError` where what it serves did not come this way.
        """
        if first is not None and self.receiver.version is None and self.receiver.state == "serving":
            self._complete_first(stage, first)
            return
        if self.served is None or self.receiver.version != self.served or self.receiver.state != "serving":
            serves = self.receiver.version or "its first weights"
            text = f"{listed(stage.metas)} came alone, and the engine serves {serves}, which did not come this way"
            raise PlanError(text, next_step=ALL_ONCE)
        _check_known(stage, self.last)
        assert self.receiver.applier is not None
        rest = self.last.keys() - stage.metas.keys()
        found = read_back(self.receiver.host, self.receiver.applier.plan, self.metas, rest - self.kept.keys())
        for name in rest:
            stage.metas[name], stage.digests[name] = self.last[name]
            stage.tensors[name] = found[name] if name in found else self.kept[name]

    def _complete_first(self, stage: Stage, first: First) -> None:
        came = len(stage.metas)
        found = {name: tensor.cpu() for name, tensor in first()}
        _check_known(stage, found)
        if 2 * came >= len(found):
            raise PlanError(f"{came} of {len(found)} tensors came: these are not some weights alone", next_step=ALL_ONCE)
        for name in found.keys() - stage.metas.keys():
            stage.metas[name] = meta = structs.replace(nameless(found[name]), name=name)
            stage.tensors[name] = found[name].contiguous()
            stage.digests[name] = sum_of(stage.tensors[name], meta)

    def _packed(self) -> set[str]:
        """Tensors of which a layer keeps something in another layout than the checkpoint's."""
        applier = self.receiver.applier
        assert applier is not None
        routed = {route.tensor for route in applier.plan.routes if route.tensor and layer_of(route.param) not in applier.direct}
        return {self.metas[name].alias_of or name for name in routed | applier.plan.computed.keys()}

    def dirty(self) -> str | None:
        """Why the model must not run, or None."""
        if (reason := self.receiver.dirty()) is not None:
            return reason
        return self.halved[1] if self.halved and self.halved[0] == self.receiver.version else None

    def look(self, stage: Stage) -> WorkerPlan:
        """What the loader would do with the tensors that have come. The receiver's plan stays."""
        try:
            return trace(self.receiver.host, list(stage.metas.values()))
        except PlanError as error:
            return trace(self.receiver.host, tied(stage.metas, stage.tensors, error))

    def exchange(self, stage: Stage, topic: str, plan: WorkerPlan) -> list[WorkerPlan]:
        bodies = self.peers.exchange(f"{topic} {len(stage.metas)}", encode(plan))
        return [decode(body, WorkerPlan) for body in bodies]

    def _open(self, manifest: Manifest, me: WorkerContext) -> Reader:
        return StageReader(self.stage) if manifest.location.transport == STAGED else self.opened(manifest, me)

    def _prepared(self, version: str) -> Manifest:
        try:
            return self._prepare(version)
        except Exception as error:
            self.peers.fail(error)
            raise as_instep(error) from error

    def _prepare(self, version: str) -> Manifest:
        """Everything that can be refused is refused here, in all workers alike."""
        metas, stage = self._planned(), self.stage
        for meta in metas:
            if meta.dtype != stage.metas[meta.name].dtype:
                stage.tensors[meta.name] = stage.tensors[meta.name].to(getattr(torch, meta.dtype))
                stage.digests[meta.name] = sum_of(stage.tensors[meta.name], meta)
        own = {meta.name: stage.digests[meta.name] for meta in metas if not meta.alias_of}
        manifest = Manifest(version, None, metas, own, Location(STAGED, f"round {stage.number}", 0))
        try:
            seconds = self.peers.timeout
            self._ask("prepare", Arrival, PrepareRequest(manifest, signature(self._listed()), lease=seconds, timeout=seconds))
            self.peers.exchange("ready", b"")
        except InstepError:
            with suppress(InstepError):
                self._ask("abort", type(None))
            raise
        return manifest

    def _commit(self, version: str) -> WorkerReceipt:
        try:
            receipt = self._ask("commit", WorkerReceipt, CommitRequest(version))
            self.peers.exchange("done", b"")
        except InstepError as error:
            self.peers.fail(error)
            if self.receiver.state == "serving":
                self.halved = self.receiver.version, f"not every worker has committed {version}: {error}"
            raise
        return receipt

    def _planned(self) -> list[TensorMeta]:
        """The metadata to commit, in the dtypes that the engine stores."""
        metas = self._listed()
        check_metadata(metas)
        wanted = signature(metas)
        mine = self.plan.signature if self.plan and self.receiver.signature == self.plan.signature else ""
        if any(theirs.decode() != wanted for theirs in self.peers.exchange("signature", mine.encode())):
            self.plan = None
            metas, traced = self._traced(metas)
            plans = self.exchange(self.stage, "plan", traced)
            new = {name: other for name in unread(self.stage.metas, plans) if name not in self.aliases and (other := self._twin(name))}
            if new:
                self.aliases |= new
                metas = self._listed()
                plans = self.exchange(self.stage, "tied", self._trace(metas))
            self.plan = self._proved(metas, plans)
        assert self.plan is not None
        casts = self.plan.casts
        return [structs.replace(meta, dtype=casts.get(meta.alias_of or meta.name, meta.dtype)) for meta in metas]

    def _traced(self, metas: list[TensorMeta]) -> tuple[list[TensorMeta], WorkerPlan]:
        """What the loader would do, and the metadata for which it would. An engine that ties what
        came under two names takes both where their bytes are the same: nobody declares ties
        here."""
        try:
            return metas, self._trace(metas)
        except PlanError as error:
            found = {meta.name: meta.alias_of for meta in tied(self.stage.metas, self.stage.tensors, error) if meta.alias_of}
            self.aliases = needed(found, self.stage.metas, self._cannot)
            metas = self._listed()
            return metas, self._trace(metas)

    def _cannot(self, aliases: dict[str, str]) -> bool:
        """Whether the loader cannot be traced with these aliases alone."""
        self.aliases = aliases
        with suppress(PlanError):
            trace(self.receiver.host, self._listed())
            return False
        return True

    def _listed(self) -> list[TensorMeta]:
        """What came, with the ties that were found out, as far as they still hold."""
        held = {name: other for name, other in self.aliases.items() if name in self.stage.metas and self._twin(name) == other}
        return [structs.replace(meta, alias_of=held.get(meta.name)) for meta in self.stage.metas.values()]

    def _twin(self, name: str) -> str | None:
        return twin(name, self.stage.metas, self.stage.tensors)

    def _proved(self, metas: list[TensorMeta], plans: Sequence[WorkerPlan]) -> Plan:
        absent = sorted(self.last.keys() - self.stage.metas.keys())
        try:
            if absent and any(plan.computed for plan in plans):  # no proof tells what such a loader needs
                raise PlanError("the last update of all weights had it")
            return prove("the engine", metas, plans, cast=self.cast)
        except PlanError as error:
            missing = absent or lacking(plans)
            text = f"the round is incomplete, {listed(missing)} did not come: {error.args[0]}" if missing else error.args[0]
            raise PlanError(text, tensor=error.tensor, next_step="send all tensors of the checkpoint that the engine loads") from error

    def _trace(self, metas: list[TensorMeta]) -> WorkerPlan:
        return self._ask("trace", WorkerPlan, TraceRequest(metas, signature(metas)))

    def _ask(self, method: str, kind: type[T], body: Any = None) -> T:
        self.seq += 1
        reply = decode(self.receiver.handle(method, encode(Request(self.seq, STAGED, raw(body)))), Reply)
        if reply.fault is not None:
            raise by_name(reply.fault.kind)(reply.fault.message, tensor=reply.fault.tensor, next_step=reply.fault.next_step)
        return decode(reply.body, kind)


def _check_known(stage: Stage, known: Collection[str]) -> None:
    if strange := stage.metas.keys() - set(known):
        raise PlanError(f"{listed(strange)} came alone, and was not in the last update of all weights", tensor=min(strange))
