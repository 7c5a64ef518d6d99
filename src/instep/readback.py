"""Messages of the call `digest`, which asks a worker what its live storage holds."""

from __future__ import annotations

import msgspec

from instep.protocol import Region, TensorMeta


class DigestRequest(msgspec.Struct, frozen=True):
    """Asks what a worker holds of the tensors `names`. tensors, signature: the whole list, as in
    `TraceRequest`. unordered: digest whole parameters instead, in any order of their elements
    (`digest.unordered`)."""

    tensors: list[TensorMeta]
    signature: str
    names: list[str]
    unordered: bool = False


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one parameter of a worker holds of one checkpoint tensor.

    param: the worker's. dtype: that the engine stores. regions: of the tensor. total: their sum
    without the seed (see `digest.py`).
    proved: a push has shown that the engine keeps this layer as the checkpoint has it.
    """

    tensor: str
    param: str
    dtype: str
    regions: list[Region]
    total: int
    proved: bool


class Held(msgspec.Struct, frozen=True):
    """Answers `DigestRequest`. unread: tensors that cannot be read back from this worker, and
    why."""

    parts: list[Part]
    unread: dict[str, str]
