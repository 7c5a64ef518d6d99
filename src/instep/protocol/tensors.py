"""What a trainer says of its tensors, and what a worker's loader does with them."""

from __future__ import annotations

import math

import msgspec

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, for each dtype name that may travel (PyTorch's names without the `torch.`
prefix)."""


def dtype_name(dtype: object) -> str:
    """Returns `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One checkpoint tensor, by the name that `save_pretrained` would write. alias_of: another
    tensor of the same list with the same bytes (a tied head). An engine that keeps the two apart
    reads them twice."""

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
    """A strided box of elements in a tensor's flat index space, as `torch.as_strided` takes it
    (units: elements)."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Route(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One copy: `source` of checkpoint tensor `tensor` goes to `target` of parameter `param`.
    Without a tensor: a constant (padding)."""

    tensor: str | None
    source: Region | None
    param: str
    target: Region


class ParamMeta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One parameter of a worker in checkpoint layout, or a buffer that its module saves. `spare`
    elements need not be written: `kept`."""

    name: str
    layer: str
    dtype: str
    shape: tuple[int, ...]
    spare: int = 0
    kept: str | None = None
    buffer: bool = False


class WorkerPlan(msgspec.Struct, frozen=True):
    """What one worker's loader did with shape-only tensors: the parameters it has and the copies it
    made.

    reload_only: layers whose writes cannot be expressed as copies, with the reason. They always use
    the reload session. opaque: the parameters that are written so. computed, feeds: what was read
    for that, and for which layers, by tensor. unnoticed: layers that the session would leave as
    they are. overwritten: tensors that the loader writes into, and must be given copies of.
    """

    params: list[ParamMeta]
    routes: list[Route]
    reload_only: dict[str, str]
    opaque: list[str] = []
    computed: dict[str, list[Region]] = {}
    feeds: dict[str, list[str]] = {}
    unnoticed: list[str] = []
    overwritten: list[str] = []
