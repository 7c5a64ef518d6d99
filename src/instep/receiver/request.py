"""Decodes requests to prepare. Tensors, and often their places, stay from version to version and
are decoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
from msgspec import structs

from instep.digest import MASK, seed_of
from instep.errors import PlanError
from instep.protocol import Location, Manifest, PrepareRequest, TensorMeta, decode


class _Manifest(Manifest, frozen=True, kw_only=True):
    """A `Manifest` on the wire. Fields that take long to decode are left raw."""

    tensors: msgspec.Raw  # type: ignore[assignment]
    location: msgspec.Raw  # type: ignore[assignment]


class _Prepare(PrepareRequest, frozen=True, kw_only=True):
    manifest: _Manifest


def decode_prepare(body: msgspec.Raw) -> PrepareRequest:
    """Decodes a request. Equal bytes give the same objects, so callers must not change them. Raises
    `msgspec.DecodeError` as `decode` does."""
    wire = decode(body, _Prepare)
    tensors, location = _tensors(bytes(wire.manifest.tensors)), _location(bytes(wire.manifest.location))
    return structs.replace(wire, manifest=structs.replace(wire.manifest, tensors=tensors, location=location))


@lru_cache(maxsize=4)
def _tensors(data: bytes) -> list[TensorMeta]:
    return decode(data, list[TensorMeta])


@lru_cache(maxsize=4)
def _location(data: bytes) -> Location:
    return decode(data, Location)


class Expected:
    """The tensors of a plan."""

    def __init__(self, tensors: Sequence[TensorMeta]) -> None:
        self.shapes = _shapes(tensors)
        self.checked: Sequence[TensorMeta] | None = None  # the last list that was as expected
        self.seeds: dict[str, int] = {}  # of each tensor's digest

    def check(self, tensors: Sequence[TensorMeta]) -> None:
        """Raises `PlanError` where a manifest's tensors differ from the plan's. A dtype may differ:
        the plan says which tensors it casts."""
        if tensors is self.checked:
            return
        if _shapes(tensors) != self.shapes:
            raise PlanError("the manifest's tensors are not those of the plan. Push again")
        self.checked, self.seeds = tensors, {meta.name: seed_of(meta) for meta in tensors if not meta.alias_of}

    def sums(self, digests: Mapping[str, int]) -> dict[str, int] | None:
        """Returns the sums that a worker finds if it reads all of each tensor and holds the
        trainer's bytes. None while digests are unknown."""
        return {name: (digest - self.seeds.get(name, 0)) & MASK for name, digest in digests.items()} if digests else None


def _shapes(tensors: Sequence[TensorMeta]) -> dict[str, tuple[tuple[int, ...], str | None]]:
    return {meta.name: (meta.shape, meta.alias_of) for meta in tensors}
