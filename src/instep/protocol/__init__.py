"""What travels between a trainer and the workers of an engine: msgspec structs, encoded as msgpack,
never unpickled.

One call is one `Request` to every worker of an engine and one `Reply` from each. A worker never
raises across its engine's RPC: what went wrong is a `Fault` inside the reply. Replies carry the
sequence number of the request they answer, by which late ones are recognised.

    tensors.py   what a trainer says of its tensors, and what a worker's loader does with them
    version.py   one version: its list of tensors, and where its bytes lie
    messages.py  requests and replies
    wire.py      messages as bytes
"""

from __future__ import annotations

from instep.protocol.messages import (
    AdapterConfig,
    Again,
    Arrival,
    CommitRequest,
    Fault,
    Identity,
    Method,
    PrepareRequest,
    Reply,
    Request,
    State,
    TraceRequest,
    Withdrawn,
    WorkerReceipt,
)
from instep.protocol.tensors import ITEM_BYTES, ParamMeta, Region, Route, TensorMeta, WorkerPlan, dtype_name
from instep.protocol.version import Location, Manifest, Place
from instep.protocol.wire import decode, encode, raw

__all__ = [
    "ITEM_BYTES",
    "AdapterConfig",
    "Again",
    "Arrival",
    "CommitRequest",
    "Fault",
    "Identity",
    "Location",
    "Manifest",
    "Method",
    "ParamMeta",
    "Place",
    "PrepareRequest",
    "Region",
    "Reply",
    "Request",
    "Route",
    "State",
    "TensorMeta",
    "TraceRequest",
    "Withdrawn",
    "WorkerPlan",
    "WorkerReceipt",
    "decode",
    "dtype_name",
    "encode",
    "raw",
]
