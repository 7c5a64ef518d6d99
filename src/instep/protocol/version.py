"""One version: its list of tensors, and where its bytes lie."""

from __future__ import annotations

import msgspec

from instep.protocol.tensors import Region, TensorMeta


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a part of a tensor lies in shared memory. It is a box of rows, each of them contiguous
    in both. The first begins at byte `at` of allocation `handle`, each `stride` elements after the
    one before it."""

    part: Region
    handle: int
    at: int
    stride: int


class Location(msgspec.Struct, frozen=True):
    """Where a version's bytes lie. `address` means something to the transport alone. packed: how
    one run of bytes is laid out (`plan.packed`). places: in which of several `handles` the parts of
    each tensor lie; board: in which of them, and where, the trainer's GPU tells their sums
    (`transport.ipc.export.Exposed`). A version that is sent in buckets of `bucket` bytes has each
    worker's rank in the group in `ranks`, by its incarnation. sending: tells what is sent to one
    group apart. live: whether the bytes are the trainer's own, and gone when it steps."""

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
    """One version: its tensors, their digests (unsigned 64 bits, see `digest.py`) and where the
    bytes lie.

    listed: the list's signature. On the wire `tensors` is empty where the worker has that list, and
    `sums` is the vector of digests."""

    version: str
    base: str | None
    tensors: list[TensorMeta]
    digests: dict[str, int]
    location: Location
    merged: bool = False  # whether an adapter is merged into the tensors: an engine must not apply it a second time
    listed: str = ""
    sums: bytes = b""
    nbytes: int = 0  # of the tensors, for a server that counts what its engine takes where it does not have the list
