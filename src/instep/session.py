"""The state of a `WeightSync`, for `steps.py`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from msgspec import structs

from instep.config import Config
from instep.engine.fleet import Fleet
from instep.errors import InstepError, VersionConflict
from instep.history import History
from instep.plan.routes import signature
from instep.protocol import Manifest, TensorMeta
from instep.source.guarded import Guarded
from instep.telemetry import Sink
from instep.transport import Published
from instep.transport.auto import AutoTransport


@dataclass(frozen=True)
class Sent:
    """A version as it was published.

    manifest: what engines are told. stamp: the source's, before its tensors were read. expected:
    what the trainer's forward said of the canary. finish: waits for the digests of what was
    published.
    required: the digests that it must have, where it was pushed before.
    """

    manifest: Manifest
    published: Published
    stamp: Hashable
    expected: list[float] | None
    finish: Callable[[Published], Published]
    required: Mapping[str, int] | None = None

    @cached_property
    def finished(self) -> Published:
        return self.finish(self.published)

    def digests(self) -> dict[str, int]:
        """Returns the digests by tensor. On a GPU they are computed while the engines prepare
        and pull.

        Raises `VersionConflict` where they are not those that they must be.
        """
        if self.required is not None:
            check_same(self.manifest.version, self.finished.digests, self.required)
        return self.finished.digests

    @property
    def known(self) -> Mapping[str, int]:
        """The digests if they were computed; empty if not."""
        finished: Published | None = vars(self).get("finished")
        return finished.digests if finished else {}

    def for_those_behind(self) -> Sent:
        """Returns the same publication without a base: an engine that is behind need not serve the
        version's base."""
        sent = replace(self, manifest=structs.replace(self.manifest, base=None))
        vars(sent).update({name: value for name, value in vars(self).items() if name == "finished"})
        return sent


@dataclass
class Session:
    """The state of one `WeightSync`, kept from push to push."""

    config: Config
    source: Guarded
    fleet: Fleet
    transport: AutoTransport
    sinks: Sequence[Sink]
    history: History[int] = field(default_factory=History)
    """Which push each version was: a version is pushed once."""
    pushes: int = 0
    described: list[TensorMeta] = field(default_factory=list)
    """The source's tensors as they were checked last. Their signature and sizes hold for an equal
    list."""
    signature: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    cast: tuple[list[TensorMeta], str] = field(default_factory=lambda: ([], ""))
    """The last list that was another than the source's, such as one in other dtypes, and its
    signature."""
    current: Sent | None = None
    """The version that at least one engine serves, still published."""

    def to_be_had(self) -> Sent | None:
        """Returns the current version if its bytes can still be read. Bytes in the trainer's own
        memory are gone when the trainer steps."""
        current = self.current
        return None if current and current.manifest.location.live and self.source.stamp() != current.stamp else current

    def free_left_versions(self, *, stays: bool) -> None:
        """Frees the memory of versions that no engine reads any more, for the next version.
        stays: whether the current version's memory is kept."""
        held = {address for member in self.fleet.members for address in member.holding}
        location = self.current.manifest.location if self.current else None
        if location and stays:
            held.add(location.address)
        elif location and not location.live and location.address not in held:
            self.current = None
        self.transport.release_all_but(held)

    def keep(self, sent: Sent) -> None:
        """Makes this version, which an engine serves, the current one."""
        with suppress(InstepError):  # the engine has proved the version by itself
            sent.digests()
        self.current = sent
        version = sent.manifest.version
        if version not in self.history:
            self.pushes += 1
            self.history[version] = self.pushes

    def signature_of(self, tensors: list[TensorMeta]) -> str:
        """Returns the signature of a list, which takes milliseconds for many tensors."""
        if tensors is self.described:
            return self.signature
        if tensors != self.cast[0]:
            self.cast = tensors, signature(tensors)
        return self.cast[1]

    def sizes_of(self, tensors: Sequence[TensorMeta]) -> dict[str, int]:
        """Returns the bytes of each tensor that is sent."""
        return self.sizes if tensors is self.described else {meta.name: meta.nbytes for meta in tensors if not meta.alias_of}


def check_same(version: str, found: Mapping[str, int], pushed: Mapping[str, int]) -> None:
    """Raises `VersionConflict` if weights that are sent again as `version` differ from those
    that were pushed as it."""
    if found != pushed:
        name = next(name for name in found if found[name] != pushed.get(name))
        raise VersionConflict(
            f"the trainer's weights are no longer those of {version!r}: {name} has changed since it was pushed",
            tensor=name,
            next_step="engines keep what they serve: push the weights of now as a new version, which reaches all engines",
        )
