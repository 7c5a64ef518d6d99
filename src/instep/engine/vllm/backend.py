"""instep as a backend of vLLM's own weight transfer, for vLLM 0.26 to 0.32:

    LLM(model=path, weight_transfer_config={"backend": "instep"})   # or --weight-transfer-config '{"backend": "instep"}'

With it vLLM's four phases bring what `publisher.py` has published, and `WeightSync` reaches the
engine without a worker extension.

    init     lets a new trainer take over, and may set the deadline of the phases
    start    forgets what was staged
    update   traces (the first time), proves the plan, opens the version, proves its bytes: what the engine serves does not change.
             A version may come in parts: all this is done with the last of them
    finish   commits, in one call: between two engine steps

Three things follow from how vLLM makes these calls.

**The plan is proved in the workers.** The phases return nothing, so no trainer could put the
workers' traces together. The workers do: each sends its replies to all others through the store
that vLLM's own process group was built on, and each then judges all of them as a trainer does, with
the same code (`member.Member`). All come to the same end: one worker that fails ends the update in
all.

**One worker raises for all.** vLLM reads the workers' replies in the order of their ranks and stops
at the first that failed; those behind it stay in their queues, and every later call gets the
replies of the one before it. So the last worker alone raises what all agree on. And as vLLM takes
back its mark of an update in progress only where a worker raised, the mark is taken back here in
all of them.

**A dirty worker refuses to run.** Half an update is known to the workers and to whoever called
`finish`. Should the engine be asked to generate before an update has healed it, the worker's next
step raises `EngineDirty`, which ends the engine: better than tokens of two versions.
"""

from __future__ import annotations

import asyncio
import binascii
import inspect
import logging
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch

from instep.config import Config
from instep.engine.member import Member
from instep.engine.vllm.attach import attach
from instep.engine.vllm.guard import refuse_while
from instep.engine.vllm.parts import ANEW, Parts
from instep.engine.vllm.peers import Peers, receiver_of, speaks
from instep.engine.vllm.workers import Workers
from instep.errors import ConfigError, EngineState, InstepError, SyncError, VersionConflict
from instep.extras import needed_by
from instep.plan.routes import check_metadata, signature
from instep.protocol import CommitRequest, Manifest, Request, decode, encode

with needed_by("vLLM's weight-transfer backend"):
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

logger = logging.getLogger("instep")
T = TypeVar("T")

CALLS_OF_A_PHASE = 1 << 16
"""Sequence numbers of one phase, more than it makes calls: a worker that left one early is in step
in the next."""

SESSION = "vllm"
"""A trainer that uses the phases takes over from the one before it at once: vLLM itself lets in one
update at a time."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Arguments of the phase `init`. timeout: seconds that a worker waits for the others, and
    for the proof of the bytes."""

    timeout: float = Config().timeout

    def __post_init__(self) -> None:
        Config(timeout=self.timeout)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Arguments of the phase `update`. manifest: an encoded `Manifest`, in base64. It is the
    whole version, or `part` of `parts`, counted from 1."""

    manifest: str
    part: int = 1
    parts: int = 1


class InstepEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Stages in `update`, commits in `finish`. Every method runs in all workers of an engine, and
    raises in the last of them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.worker = _worker_that_calls()
        attach(self.worker)
        refuse_while(self.worker, self._dirty)
        self.speaks = speaks(self.worker)
        self.staged: Manifest | None = None
        self.parts = Parts()
        self.peers = Peers.of(self.worker, "phases", 0.0)
        self.init_transfer_engine(InitInfo())

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo | None:
        """Returns None if the arguments are wrong and another worker raises the error."""
        parse: Callable[[dict[str, Any]], InitInfo] = super().parse_init_info
        return self._with_one_voice(lambda: parse(init_dict))

    def init_transfer_engine(self, init_info: InitInfo | None) -> None:
        """Lets another trainer push from here on."""
        if init_info is not None:
            self.peers.timeout = init_info.timeout
            self.member = Member(Workers(self.worker, self.peers), SESSION, init_info.timeout)
            self._start_over()

    def start_weight_update(self) -> None:
        self._unstage()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._with_one_voice(lambda: self._in_step(lambda: self.receive_weights(self.parse_update_info(update_info))))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        asyncio.run(self._stage(update_info))

    def finish_weight_update(self) -> None:
        self._with_one_voice(lambda: self._in_step(lambda: asyncio.run(self._commit())))

    def shutdown(self) -> None:
        self._unstage()

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Exists because the method is abstract in vLLM 0.26 and 0.27. It is gone from 0.28."""
        raise NotImplementedError("send weights with instep.WeightSync, or with instep.engine.vllm.publisher.WeightPublisher")

    async def _stage(self, info: UpdateInfo) -> None:
        manifest = self.parts.add(decoded(info), info.part, info.parts)
        if manifest is None:
            return
        check_metadata(manifest.tensors)
        await self.member.hello()
        if not self.member.planned(signed := signature(manifest.tensors)):
            await self.member.trace(manifest.tensors, signed, cast=False)
        await self.member.prepare(manifest, lambda: manifest.digests)
        self.staged = manifest

    async def _commit(self) -> None:
        if (manifest := self.staged) is None:
            raise VersionConflict(self.parts.missing() or "no version is staged: there is nothing to finish", next_step=ANEW)
        self.staged, self.parts = None, Parts()
        request = CommitRequest(manifest.version, manifest.digests)
        await self.member.commit(manifest, request, "keep", lambda: manifest.digests)

    def _in_step(self, phase: Callable[[], None]) -> None:
        """Runs a phase in which workers ask each other. Raises `SyncError` if the phase failed
        or was late in another worker."""
        self.member.seq = CALLS_OF_A_PHASE * self.peers.begin()
        try:
            phase()
        except Exception as error:
            self.peers.fail(error)
            raise
        try:
            self.peers.exchange("end", b"")
        except InstepError as elsewhere:
            if self.member.serving == "new":
                asyncio.run(self.member.condemn(elsewhere.args[0]))
            raise SyncError(f"{self.member.name}: {elsewhere.args[0]}") from elsewhere

    def _dirty(self) -> str | None:
        receiver = receiver_of(self.worker)
        return receiver.dirty() if receiver is not None else None

    def _state(self) -> EngineState:
        receiver = receiver_of(self.worker)
        return EngineState(self.member.name, "dirty" if self._dirty() else "old", receiver.version if receiver is not None else None)

    def _unstage(self) -> None:
        self.staged, self.parts = None, Parts()
        if receiver_of(self.worker) is not None:
            self.worker.instep_call("abort", encode(Request(0, SESSION)))

    def _start_over(self) -> None:
        """Resets this worker, so that workers that ended a phase in different ways make the same
        calls in the next: all trace, and none aborts first."""
        self._unstage()
        self.member.condemned = None
        if (receiver := receiver_of(self.worker)) is not None:
            receiver.signature = None

    def _with_one_voice(self, action: Callable[[], T]) -> T | None:
        """Runs `action` and raises its error in one worker alone. In the others, returns None
        after an error."""
        try:
            return action()
        except Exception as error:
            if isinstance(error, SyncError):
                error.engines = (self.member.state(),)
            elif isinstance(error, InstepError):
                error.args = (f"{error.args[0]}; {self._state()}",)
            logger.warning("rank %d: %s", self.worker.rank, error)
            self._start_over()
            self.worker._weight_update_active = False
            if self.speaks:
                raise
            return None


def decoded(info: UpdateInfo) -> Manifest:
    """Returns the manifest. Raises `ConfigError` for one that no publisher has made."""
    try:
        return decode(b64decode(info.manifest, validate=True), Manifest)
    except (TypeError, ValueError, binascii.Error, msgspec.DecodeError) as error:
        raise ConfigError(
            f"update_info holds no manifest of this version of instep: {error}", next_step="pass on what WeightPublisher.update_info gave"
        ) from error


def _worker_that_calls() -> Any:
    """Returns the worker that is building its backend. vLLM gives a backend the model but not
    the worker, so this function looks through the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if hasattr(found, "model_runner") and hasattr(found, "finish_weight_update"):
            return found
        frame = frame.f_back
    raise ConfigError(
        "this vLLM builds its weight transfer engine in a way that instep does not know",
        next_step='start it with worker_extension_cls="instep.vllm.WorkerExtension" instead of the backend',
    )
