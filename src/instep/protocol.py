"""What travels between a trainer and the workers of an engine: msgspec structs, encoded as msgpack, never unpickled.

One call is one `Request` to every worker of an engine and one `Reply` from each. A worker never raises across its engine's RPC: what went
wrong is a `Fault` inside the reply. Replies carry the sequence number of the request they answer, by which late ones are recognised.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

import msgspec

Method = Literal["hello", "trace", "reserve", "prepare", "ready", "commit", "accept", "abort", "status", "digest"]
State = Literal["serving", "unproved", "dirty"]

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, for each dtype name that may travel (PyTorch's names without the `torch.` prefix)."""


def dtype_name(dtype: object) -> str:
    """Returns `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One checkpoint tensor, by the name that `save_pretrained` would write. alias_of: another tensor of the same list with the same bytes
    (a tied head). An engine that keeps the two apart reads them twice."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


class Region(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A strided box of elements in a tensor's flat index space, as `torch.as_strided` takes it (units: elements)."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Route(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One copy: `source` of checkpoint tensor `tensor` goes to `target` of parameter `param`. Without a tensor: a constant (padding)."""

    tensor: str | None
    source: Region | None
    param: str
    target: Region


class ParamMeta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One parameter of a worker in checkpoint layout, or a buffer that its module saves. `spare` elements need not be written: `kept`."""

    name: str
    layer: str
    dtype: str
    shape: tuple[int, ...]
    spare: int = 0
    kept: str | None = None
    buffer: bool = False


class WorkerPlan(msgspec.Struct, frozen=True):
    """What one worker's loader did with shape-only tensors: the parameters it has and the copies it made.

    reload_only: layers whose writes cannot be expressed as copies, with the reason. They always use the reload session. opaque: the
    parameters that are written so. computed, feeds: what was read for that, and for which layers, by tensor. unnoticed: layers that the
    session would leave as they are. overwritten: tensors that the loader writes into, and must be given copies of.
    """

    params: list[ParamMeta]
    routes: list[Route]
    reload_only: dict[str, str]
    opaque: list[str] = []
    computed: dict[str, list[Region]] = {}
    feeds: dict[str, list[str]] = {}
    unnoticed: list[str] = []
    overwritten: list[str] = []


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a part of a tensor lies in shared memory. It is a box of rows, each of them contiguous in both. The first begins at byte `at`
    of allocation `handle`, each `stride` elements after the one before it."""

    part: Region
    handle: int
    at: int
    stride: int


class Location(msgspec.Struct, frozen=True):
    """Where a version's bytes lie. `address` means something to the transport alone. packed: how one run of bytes is laid out
    (`plan.packed`). places: in which of several `handles` the parts of each tensor lie; board: in which of them, and where, the trainer's
    GPU tells their sums (`transport.ipc.export.Exposed`). A version that is sent in buckets of `bucket` bytes has each worker's rank in the
    group in `ranks`, by its incarnation. sending: tells what is sent to one group apart. live: whether the bytes are the trainer's own,
    and gone when it steps."""

    transport: str
    address: str
    nbytes: int
    packed: bool = False
    handles: list[bytes] = []
    places: dict[str, list[Place]] = {}
    board: tuple[int, int] | None = None
    bucket: int = 0
    ranks: dict[str, int] = {}
    sending: str = ""
    live: bool = False


class Manifest(msgspec.Struct, frozen=True):
    """One version: its tensors, their digests (unsigned 64 bits, see `digest.py`) and where the bytes lie.

    listed: the list's signature. On the wire `tensors` is empty where the worker has that list, and `sums` is the vector of digests."""

    version: str
    base: str | None
    tensors: list[TensorMeta]
    digests: dict[str, int]
    location: Location
    merged: bool = False  # whether an adapter is merged into the tensors: an engine must not apply it a second time
    listed: str = ""
    sums: bytes = b""
    nbytes: int = 0  # of the tensors, for a server that counts what its engine takes where it does not have the list


class Request(msgspec.Struct, frozen=True):
    """One call to a worker. `body` is the encoded request of the method, such as a `TraceRequest`; nil where it takes none. session: the
    `WeightSync` that asks. Two trainers that prepare the same engine are told apart by it."""

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
    """A version that a worker served until something else than a push changed its weights, and what that was."""

    version: str
    why: str


class Identity(msgspec.Struct, frozen=True):
    """Answer to hello and status: who this worker is and what it holds. gpu: a UUID, whatever number the process knows the GPU by.
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
    """Run the engine's loader over these shapes. Answered by a `WorkerPlan`; `signature` is that of the list (`plan.routes.signature`)."""

    tensors: list[TensorMeta]
    signature: str
    config: str = ""  # of an adapter: what peft writes into `adapter_config.json`


class AdapterConfig(msgspec.Struct, frozen=True):
    """A LoRA adapter. number: of its requests (`lora_int_id`). config: see `TraceRequest`."""

    number: int
    config: str


class PrepareRequest(msgspec.Struct, frozen=True):
    """Open this version. Answered by an `Arrival`; `signature` is that of the plan that it will take. workers: incarnations of all that are
    asked. Of bytes that all of them see each looks at its share, and the trainer adds up what they tell."""

    manifest: Manifest
    signature: str
    lease: float  # seconds after which another session may take over from a trainer that never came back to commit
    timeout: float  # seconds that a worker may wait for other processes in one step
    workers: list[str] = []
    left_at: str | None = None  # the version that a trainer takes them to serve, where it did not ask (`hello`)
    wholes: list[str] = []  # tensors of which a worker sums up all, and not what it reads (`plan.routes.Plan`)


class Arrival(msgspec.Struct, frozen=True):
    """Answer to prepare and ready. digests: the vector (`plan.sums.vector`) of what has arrived, for the trainer to compare with its own.
    parts: the same where each worker has looked at its share, to be added up (`plan.sums.check_parts`)."""

    done: bool
    digests: bytes = b""
    parts: bytes = b""


class Again(msgspec.Struct, frozen=True):
    """Prepare what was prepared last once more, as another version. address, sending: of its location. left_at: as in `PrepareRequest`."""

    address: str
    sending: str
    base: str | None
    left_at: str | None
    merged: bool = False

    @classmethod
    def of(cls, manifest: Manifest, left_at: str | None) -> Again:
        return cls(manifest.location.address, manifest.location.sending, manifest.base, left_at, manifest.merged)


class CommitRequest(msgspec.Struct, frozen=True):
    """Take the version that was prepared, or is to be prepared `again` first. Answered by a `WorkerReceipt`. digests: of all its tensors,
    where the trainer has them by now. launch: which of the sums that the trainer's GPU tells are those of this version; 0 for none.
    hold: keep other trainers away until this one aborts: it has yet to label the engine and to have it go on."""

    version: str
    digests: dict[str, int] = {}
    launch: int = 0
    again: Again | None = None
    hold: bool = False


class WorkerReceipt(msgspec.Struct, frozen=True):
    """What one worker did in a commit, with seconds by phase. read_back: how many tensors were proved in it, by comparing live storage or
    by sums taken while they were pulled (see `digest.py`). wholes, parts: these sums (see `plan.sums.Told`).
    theirs: the trainer's own, where they can be read. proved: whether it has seen by itself that it holds the trainer's bytes."""

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


T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Raises `msgspec.DecodeError` where the bytes are not a well-formed `kind`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UnicodeDecodeError as error:  # of which msgspec makes no DecodeError
        raise msgspec.DecodeError(str(error)) from error
