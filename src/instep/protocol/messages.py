"""Requests to a worker and its replies."""

from __future__ import annotations

from typing import Literal

import msgspec

from instep.protocol.tensors import TensorMeta
from instep.protocol.version import Manifest

Method = Literal["hello", "trace", "decide", "reserve", "prepare", "ready", "commit", "accept", "abort", "status", "digest"]
State = Literal["serving", "unproved", "dirty"]


class Request(msgspec.Struct, frozen=True):
    """One call to a worker. `body` is the encoded request of the method, such as a `TraceRequest`;
    nil where it takes none. session: the `WeightSync` that asks. Two trainers that prepare the same
    engine are told apart by it."""

    seq: int
    session: str
    body: msgspec.Raw = msgspec.Raw(b"\xc0")
    adapter: int = 0  # the LoRA adapter that the call is about, by the number that requests give; 0 for the model


class Fault(msgspec.Struct, frozen=True):
    """An error in a worker. kind: a class in `errors.py`. next_step: None for the class's."""

    kind: str
    message: str
    tensor: str | None = None
    next_step: str | None = None


class Reply(msgspec.Struct, frozen=True):
    """A worker's answer to the `Request` of the same `seq`, and what the worker serves after it.
    `unproved`: it holds what its trainer has yet to prove. `body` is nil where there is a fault."""

    seq: int
    rank: int
    state: State
    version: str | None
    fault: Fault | None = None
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Withdrawn(msgspec.Struct, frozen=True):
    """A version that a worker served until something else than a push changed its weights, and what
    that was."""

    version: str
    why: str


class Identity(msgspec.Struct, frozen=True):
    """Answer to hello and status: who this worker is and what it holds. gpu: a UUID, whatever
    number the process knows the GPU by.
    holding: addresses of published versions that it still has open."""

    incarnation: str  # changes when the worker's process restarts
    rank: int
    world_size: int
    device: str
    gpu: str | None
    host: str  # equal for processes that may share memory
    pid: int
    plan_signature: str | None
    prepared: str | None
    holding: list[str]
    last_error: str | None = None
    busy: bool = False  # another trainer than the one that asks is pushing
    withdrawn: Withdrawn | None = None


class TraceRequest(msgspec.Struct, frozen=True):
    """Run the engine's loader over these shapes. Answered by a `WorkerPlan`; `signature` is that of
    the list (`plan.routes.signature`)."""

    tensors: list[TensorMeta]
    signature: str
    config: str = ""  # of an adapter: what peft writes into `adapter_config.json`


class AdapterConfig(msgspec.Struct, frozen=True):
    """A LoRA adapter. number: of its requests (`lora_int_id`). config: see `TraceRequest`."""

    number: int
    config: str


class PrepareRequest(msgspec.Struct, frozen=True):
    """Open this version. Answered by an `Arrival`; `signature` is that of the plan that it will
    take. workers: incarnations of all that are asked. Of bytes that all of them see each looks at
    its share, and the trainer adds up what they tell."""

    manifest: Manifest
    signature: str
    lease: float  # seconds after which another session may take over from a trainer that never came back to commit
    timeout: float  # seconds that a worker may wait for other processes in one step
    workers: list[str] = []
    left_at: str | None = None  # the version that a trainer takes them to serve, where it did not ask (`hello`)
    wholes: list[str] = []  # tensors of which a worker sums up all, and not what it reads (`plan.routes.Plan`)


class Arrival(msgspec.Struct, frozen=True):
    """Answer to prepare and ready. digests: the vector (`plan.sums.vector`) of what has arrived,
    for the trainer to compare with its own.
    parts: the same where each worker has looked at its share, to be added up
    (`plan.sums.check_parts`)."""

    done: bool
    digests: bytes = b""
    parts: bytes = b""


class Again(msgspec.Struct, frozen=True):
    """Prepare what was prepared last once more, as another version. address, sending: of its
    location. left_at: as in `PrepareRequest`."""

    address: str
    sending: str
    base: str | None
    left_at: str | None
    merged: bool = False

    @classmethod
    def of(cls, manifest: Manifest, left_at: str | None) -> Again:
        return cls(manifest.location.address, manifest.location.sending, manifest.base, left_at, manifest.merged)


class CommitRequest(msgspec.Struct, frozen=True):
    """Take the version that was prepared, or is to be prepared `again` first. Answered by a
    `WorkerReceipt`. digests: of all its tensors, where the trainer has them by now. launch: which
    of the sums that the trainer's GPU tells are those of this version; 0 for none.
    hold: keep other trainers away until this one aborts: it has yet to label the engine and to have
    it go on."""

    version: str
    digests: dict[str, int] = {}
    launch: int = 0
    again: Again | None = None
    hold: bool = False


class WorkerReceipt(msgspec.Struct, frozen=True):
    """What one worker did in a commit, with seconds by phase. read_back: how many tensors were
    proved in it, by comparing live storage or by sums taken while they were pulled (see
    `digest.py`). wholes, parts: these sums (see `plan.sums.Told`).
    theirs: the trainer's own, where they can be read. proved: whether it has seen by itself that it
    holds the trainer's bytes."""

    rank: int
    seconds: dict[str, float]
    direct: list[str]  # layers whose regions are copied straight into live storage from now on
    rebuilt: list[str]  # layers made anew from copied regions by the engine's own hook
    reload: dict[str, str]  # layers that stay with the engine's reload session, and why
    read_back: int
    wholes: dict[str, int] = {}
    parts: dict[str, dict[int, int]] = {}
    theirs: dict[str, int] = {}
    proved: bool = False
    unproved: dict[str, str] = {}  # layers that the session loaded, of which nothing shows what it made, and why
    compared: int = 0  # layers that the first commit has compared with the engine's initial load
