"""What a trainer knows of one engine without asking it."""

from __future__ import annotations

from dataclasses import dataclass, field

from instep.engine import Engine
from instep.errors import EngineState, InstepError, Serving
from instep.plan.routes import Plan
from instep.protocol import AdapterConfig, Identity, Manifest, Withdrawn


@dataclass
class Known:
    """One engine, and what was last heard of it."""

    engine: Engine
    session: str
    timeout: float
    adapter: AdapterConfig | None = None  # what is pushed, where it is not the model
    seq: int = 0
    version: str | None = None
    serving: Serving = "old"
    incarnation: str | None = None
    pushed: str | None = None
    """The version that this trainer last brought it, within its current incarnation."""
    attempted: set[str] = field(default_factory=set)
    """What this trainer told it to commit: a commit may succeed after its deadline."""
    condemned: str | None = None
    """Why it refuses to generate."""
    plan: Plan | None = None
    holding: set[str] = field(default_factory=set)
    """Publications that its workers may still read."""
    address: str | None = None  # of the publication that it was asked to prepare last
    workers: list[Identity] = field(default_factory=list)
    failure: InstepError | None = None
    phase: str | None = None
    withdrawn: Withdrawn | None = None
    trusted: bool = False  # not asked what it serves now

    @property
    def name(self) -> str:
        return self.engine.name

    def state(self) -> EngineState:
        failure = self.failure.args[0] if self.failure else None
        withdrawn = self.withdrawn.why if self.withdrawn and self.version is None else None
        return EngineState(self.name, self.serving, self.version, self.phase if failure else None, failure, withdrawn)

    def behind(self, version: str) -> bool:
        return self.version != version or self.serving != "old"

    def planned(self, signature: str) -> bool:
        """Whether there is a plan for tensors with this signature."""
        return self.plan is not None and self.plan.signature == signature

    def known(self, signature: str) -> bool:
        """Whether it is as this trainer's last push has left it, and has a plan, so far as one can tell without asking it."""
        left = self.serving == "new" and self.version == self.pushed and not self.holding
        return left and self.failure is None and self.condemned is None and self.planned(signature)

    def trust(self) -> None:
        """Instead of `hello`, for one that is known."""
        self.trusted, self.serving = True, "old"

    def in_place(self, manifest: Manifest) -> bool:
        """Whether it is trusted still, and finds these bytes where it found them last."""
        return self.trusted and self.address == manifest.location.address
