"""What a `WeightSync` has, for `steps.py`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from instep.config import Config
from instep.engine.fleet import Fleet
from instep.errors import VersionConflict
from instep.history import History
from instep.protocol import Manifest, TensorMeta
from instep.source.guarded import Guarded
from instep.telemetry import Sink
from instep.transport import Published
from instep.transport.auto import AutoTransport


@dataclass
class Session:
    """What one `WeightSync` has, and remembers from push to push."""

    config: Config
    source: Guarded
    fleet: Fleet
    transport: AutoTransport
    sinks: Sequence[Sink]
    history: History[int] = field(default_factory=History)
    """Which push each version was: a version is pushed once."""
    pushes: int = 0
    described: list[TensorMeta] = field(default_factory=list)
    """The source's tensors as they were checked last. Their signature and sizes hold for an equal list."""
    signature: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    current: Manifest | None = None
    """The version that at least one engine serves, still published."""
    published: Published | None = None
    digests: dict[str, int] = field(default_factory=dict)
    """Of the current version; none where they are not known."""
    expected: list[float] | None = None
    """What the trainer's forward said of the canary when the current version was published."""
    stamp: Hashable = None
    """The source's, when the current version was published."""

    def to_be_had(self) -> Manifest | None:
        """The current version, if its bytes are still to be had: those in the trainer's own memory are gone when it steps."""
        live = self.current is not None and self.current.location.live
        return None if live and self.source.stamp() != self.stamp else self.current

    def free_left_versions(self) -> None:
        """Hands the memory of versions that no engine reads any more to the next one."""
        held = {address for member in self.fleet.members for address in member.holding}
        if self.current and not self.current.location.live and self.current.location.address not in held:
            self.current = None
        self.transport.release_all_but(held)

    def remember(self, version: str) -> None:
        """An engine serves a version that was not there before, or one more has caught up with it."""
        if version not in self.history:
            self.pushes += 1
            self.history[version] = self.pushes

    def sizes_of(self, tensors: Sequence[TensorMeta]) -> dict[str, int]:
        """Bytes of each tensor that is sent."""
        return self.sizes if tensors is self.described else {meta.name: meta.nbytes for meta in tensors if not meta.alias_of}


def check_same(version: str, found: Mapping[str, int], pushed: Mapping[str, int]) -> None:
    """Raises `VersionConflict` where weights that are sent as `version` once more are not those that were pushed as it."""
    if found != pushed:
        name = next(name for name in found if found[name] != pushed.get(name))
        raise VersionConflict(
            f"the trainer's weights are no longer those of {version!r}: {name} has changed since it was pushed",
            tensor=name,
            next_step="engines keep what they serve: push the weights of now as a new version, which reaches all engines",
        )
