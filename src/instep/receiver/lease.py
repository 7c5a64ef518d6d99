"""A worker belongs to one trainer from the preparation of a version until the engine serves it
under its label."""

from __future__ import annotations

from instep.errors import EngineBusy, VersionConflict


class Lease:
    """Which trainer a worker belongs to; none at first. now: seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.session: str | None = None
        self.called_off: tuple[str, int] = ("", 0)  # which trainer has aborted, in which request
        self.version = ""
        self.seconds = self.expires = 0.0

    def take(self, now: float, session: str, version: str, seconds: float) -> None:
        """Gives the worker to a trainer. seconds: the time after which another trainer may take
        over."""
        self.session, self.version, self.seconds, self.expires = session, version, seconds, now + seconds

    def check(self, now: float, session: str) -> None:
        """Raises `EngineBusy` where the worker belongs to another trainer."""
        if self.others(now, session):
            raise EngineBusy(f"another trainer is pushing {self.version!r} to this engine")

    def others(self, now: float, session: str) -> bool:
        """Whether the worker belongs to another trainer."""
        return self.session not in (None, session) and now < self.expires

    def committed(self, now: float, *, hold: bool) -> None:
        """Extends the lease after a commit, or ends it. hold: the trainer has yet to label the
        engine and let it run on, and then calls `abort`."""
        self.expires = now + self.seconds
        if not hold:
            self.end()

    def call_off(self, session: str, seq: int) -> None:
        """Makes this trainer's earlier requests void, even those that arrive later."""
        if self.called_off[0] == session:
            seq = max(seq, self.called_off[1])
        self.called_off = session, seq

    def check_late(self, session: str, seq: int) -> None:
        """Raises `VersionConflict` for a request that its trainer has called off meanwhile."""
        if self.called_off[0] == session and seq < self.called_off[1]:
            raise VersionConflict("this request comes late: its trainer has aborted the push since")

    def end(self) -> None:
        self.session = None
