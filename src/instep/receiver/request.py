"""Decodes requests to prepare. Tensors, and often their places, stay from version to version and
are decoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
from msgspec import structs

from instep.digest import MASK, seed_of
from instep.errors import PlanError, VersionConflict
from instep.plan.routes import signature
from instep.plan.sums import named
from instep.protocol import Location, Manifest, PrepareRequest, TensorMeta, decode


class _Manifest(Manifest, frozen=True, kw_only=True):
    """A `Manifest` on the wire. Fields that take long to decode are left raw."""

    tensors: msgspec.Raw  # type: ignore[assignment]
    location: msgspec.Raw  # type: ignore[assignment]


class _Prepare(PrepareRequest, frozen=True, kw_only=True):
    manifest: _Manifest


class Lists:
    """Lists of tensors that a manifest may name by their signature: that of the worker's plan, and
    the last other one that came with a version."""

    def __init__(self, planned: str = "", tensors: list[TensorMeta] | None = None) -> None:
        self.planned = {planned: tensors} if tensors else {}
        self.other: dict[str, list[TensorMeta]] = {}

    def decode(self, body: msgspec.Raw) -> PrepareRequest:
        """Decodes a request. Equal bytes give the same objects, so callers must not change them.

        Raises `VersionConflict` for the signature of a list that is not here, `PlanError` for a
        list that is not the one that was signed, and `msgspec.DecodeError` as `decode` does.
        """
        wire = decode(body, _Prepare)
        manifest, tensors = wire.manifest, _tensors(bytes(wire.manifest.tensors))
        if manifest.listed:
            tensors = self._listed(manifest.listed, tensors)
        digests = named(manifest.sums, tensors) if manifest.sums else manifest.digests
        location = _location(bytes(manifest.location))
        return structs.replace(wire, manifest=structs.replace(manifest, tensors=tensors, digests=digests, location=location))

    def _listed(self, name: str, tensors: list[TensorMeta]) -> list[TensorMeta]:
        known = (self.planned | self.other).get(name)
        if known is not None:
            return known
        if not tensors:
            raise VersionConflict("this worker has not got the list of tensors that the trainer takes it to have")
        if name != signature(tensors):
            raise PlanError("the list of tensors is not the one that was signed")
        self.other = {name: tensors}
        return tensors


@lru_cache(maxsize=4)
def _tensors(data: bytes) -> list[TensorMeta]:
    return decode(data, list[TensorMeta])


@lru_cache(maxsize=4)
def _location(data: bytes) -> Location:
    return decode(data, Location)


class Expected:
    """The tensors of a plan."""

    def __init__(self, tensors: Sequence[TensorMeta]) -> None:
        self.tensors, self.shapes = list(tensors), _shapes(tensors)
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
