"""What a worker serves, and whether that is proved."""

from __future__ import annotations

import msgspec

from instep.errors import PlanError, VersionConflict
from instep.history import History
from instep.protocol import Request, State, Withdrawn, decode


class Taken(msgspec.Struct, frozen=True):
    """A version that a commit wrote. digest: see `Serves.history`."""

    session: str
    version: str
    digest: str | None
    merged: bool


class Serves:
    """What a worker serves. While the state is `serving`, `version` names the bytes in place."""

    def __init__(self) -> None:
        self.state: State = "serving"
        self.version: str | None = None
        self.history: History[str | None] = History()
        """Digest of each version that was served; None where its bytes came live, and only the
        trainer has them all."""
        self.last_error: str | None = None
        self.merged = False  # an adapter is merged into what is served
        self.taken: Taken | None = None  # by the last commit, unless it failed
        self.withdrawn: Withdrawn | None = None
        self.asleep: str | None = None
        """Why the weights cannot be written now."""

    def writes(self) -> None:
        """Marks the worker dirty: from now on the bytes in place belong to no version."""
        self.state, self.taken = "dirty", None

    def condemn(self, why: str) -> None:
        """Marks the worker dirty for what another worker has told: together they hold parts of two
        versions."""
        self.state, self.last_error = "dirty", why

    def wrote(self, taken: Taken, *, proved: bool) -> None:
        """Notes that all of a version is in place. A version that only the trainer can prove is not
        served before `accept`. If the trainer dies before that, nobody may take the bytes for
        proved."""
        self.taken, self.state = taken, "unproved"
        self.last_error = f"its trainer did not prove what it holds of {taken.version}"
        if proved:
            self._take(taken)

    def withdraw(self, why: str) -> None:
        """Forgets the version, because something other than a push has changed its weights."""
        if self.version is not None:
            self.withdrawn = Withdrawn(self.version, why)
        elif self.withdrawn is not None:  # a later, more precise reason
            self.withdrawn = Withdrawn(self.withdrawn.version, why)
        self.version, self.taken, self.last_error = None, None, why

    def check_awake(self, method: str) -> None:
        """Raises `PlanError` for a call that leads to a commit while the weights cannot be
        written."""
        if self.asleep is not None and method in ("trace", "decide", "prepare", "commit"):
            raise PlanError(self.asleep, next_step="wake the engine first (vLLM: wake_up()), then push")

    def accept(self, request: Request) -> None:
        """Notes that the trainer has proved what the last commit wrote. Safe to repeat.

        Raises `VersionConflict` where the last commit wrote another version or was another
        trainer's.
        """
        version, taken = decode(request.body, str), self.taken
        if taken is None or (taken.session, taken.version) != (request.session, version):
            raise VersionConflict(f"version {version!r} was not committed here")
        if self.state == "unproved":
            self._take(taken)

    def _take(self, taken: Taken) -> None:
        self.state, self.version, self.last_error, self.merged = "serving", taken.version, None, taken.merged
        self.withdrawn = None
        self.history[taken.version] = taken.digest or self.history.get(taken.version)
