"""The second read of a source, which shows that what was sent is of one moment.

The proof is a double collect: every tensor is read twice with the same result, and all first reads
end before any second read begins. So between the two the source held these very bytes, whatever
writes to it and whether or not PyTorch counts the write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from instep.digest import digest
from instep.errors import SourceError
from instep.protocol import TensorMeta
from instep.transport import Placed


def second(tensors: Sequence[TensorMeta], values: Placed) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Yields each value to compare with the first read, with the description under which it was
    sent. An alias has the description of the tensor that it stands for.

    Raises `SourceError` where a value is not the one that is described, or is not given any more.
    """
    metas, missing = {meta.name: meta for meta in tensors}, {meta.name for meta in tensors if not meta.alias_of}
    for name, value in values.again():
        meta = described_as(metas, name, value)
        missing.discard(name)
        if value is not None:
            yield metas[meta.alias_of or name], value.detach()
    if missing:
        raise SourceError(
            f"the source gave {min(missing)} once and not again: each call of `tensors` must give every value", tensor=min(missing)
        )


def described_as(metas: Mapping[str, TensorMeta], name: str, value: torch.Tensor | None) -> TensorMeta:
    """Returns the description of a value. Raises `SourceError` where there is none, or one of
    another shape."""
    meta = metas.get(name)
    if meta is None or (value is not None and tuple(value.shape) != meta.shape):
        shape = "" if value is None else f" {list(value.shape)}"
        raise SourceError(f"the source gave {name}{shape}, which is not what its metadata says", tensor=name)
    return meta


def check(tensors: Sequence[TensorMeta], values: Placed, digests: Mapping[str, int]) -> None:
    """Reads the source a second time. Raises `SourceError` where its bytes do not have the
    `digests` of what was sent."""
    for meta, value in second(tensors, values):
        if digest(value.to(getattr(torch, meta.dtype)), meta) != digests[meta.name]:
            raise SourceError.changed(meta.name)
