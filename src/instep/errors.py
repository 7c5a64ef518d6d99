"""Every error that instep raises. After a failure a user has one question: which weights does
each engine serve now?

    InstepError
      ConfigError         a wrong argument; nothing was touched
        MissingExtra      ... because a package of an extra is not installed; an `ImportError` too
      SourceError         the trainer's tensors could not be read, or changed while they were read
      PlanError           source and engine disagree about names, shapes or dtypes; no byte has moved
      VersionConflict     the version was served before, or does not follow what the engine serves
        EngineBusy        ... because another trainer is pushing to the engine
      TransportError      the bytes could not be published or opened
      SyncError           a push did not reach every engine; `.engines` says what each serves now
        EngineTimeout     ... because a deadline passed
        EngineLost        ... because a process died
        ApplyError        ... because the engine could not apply the bytes; it is dirty
        DigestMismatch    ... because the bytes are not the trainer's
        CanaryError       ... because the engine computes something else than the trainer
      EngineDirty         an engine that holds half an update was asked to generate
      GenerationError     an engine's answer to a prompt cannot be trained on

`ConfigError`, `SourceError`, `PlanError`, `VersionConflict` and `TransportError` mean that every
engine still serves what it served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Serving = Literal["old", "new", "dirty", "unknown"]

WORDS: dict[str, str] = {
    "old": "still serves {version}",
    "new": "serves {version}",
    "dirty": "DIRTY: refuses to generate until a push succeeds",
    "unknown": "does not answer; it served {version} when it last did",
}
NEVER_HEARD = "does not answer; no version of it was heard of so far"


@dataclass(frozen=True, slots=True)
class EngineState:
    """What one engine serves after a push that failed."""

    engine: str
    serving: Serving
    version: str | None
    phase: str | None = None
    reason: str | None = None
    changed: str | None = None
    """What other than a push changed the weights, which have no version since then."""

    def __str__(self) -> str:
        words = NEVER_HEARD if self.serving == "unknown" and self.version is None else WORDS[self.serving]
        if self.changed and self.serving == "old":
            words = f"serves weights that no push brought: {self.changed}"
        text = f"{self.engine}: " + words.format(version=self.version or "its own first weights")
        why = ": ".join(filter(None, (self.phase, self.reason)))
        return text + (f" ({why})" if why else "")


class InstepError(Exception):
    """Base of all errors. `next_step` says what the user can do."""

    next_step: str | None = None

    def __init__(self, message: str, *, tensor: str | None = None, next_step: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor
        if next_step is not None:
            self.next_step = next_step

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n  next: {self.next_step}" if self.next_step else text


class ConfigError(InstepError):
    """A wrong argument. Nothing was touched."""


class MissingExtra(ConfigError, ImportError):
    """A package of one of instep's extras is not installed. Nothing was touched."""


class SourceError(InstepError):
    """The trainer's tensors could not be read, or changed while they were read. Engines keep what
    they serve."""

    next_step = "no engine was touched: mend the source, then push again"

    @classmethod
    def changed(cls, tensor: str | None = None) -> SourceError:
        """Two reads of the source gave different bytes. tensor: the first that differs, if
        known."""
        seen = f" ({tensor} was read twice and differs)" if tensor else ""
        return cls(
            f"the trainer changed its weights while they were copied; no engine was touched{seen}",
            tensor=tensor,
            next_step="push between optimizer steps, from the thread that steps",
        )


class PlanError(InstepError):
    """Source and engine disagree about names, shapes or dtypes. No byte has moved."""

    next_step = "no engine was touched: give the source the names, shapes and dtypes of the checkpoint that the engine loads"


class VersionConflict(InstepError):
    """The version was served before, or does not follow what the engine serves. Engines keep what
    they serve."""

    next_step = "engines keep what they serve: `sync.status()` says what that is"


class EngineBusy(VersionConflict):
    """Another trainer is pushing to the engine. It keeps what it serves until that push is over."""

    next_step = "engines keep what they serve: wait for the other trainer's push, or stop that trainer"


class TransportError(InstepError):
    """The bytes could not be published or opened. Engines keep what they serve."""

    next_step = "engines keep what they serve: `instep doctor` looks at what transports need"


class EngineDirty(InstepError):
    """The engine holds parts of two versions and refuses to generate."""

    next_step = "push a version: a full update heals it"


class GenerationError(InstepError):
    """An engine's answer to a prompt cannot be trained on: its tokens have no log-probabilities,
    or no known version."""

    next_step = "the engine or its client is at fault; no sample was made of this answer"


class SyncError(InstepError):
    """A push did not reach every engine. `engines` says what each of them serves now."""

    next_step = "`sync.status()` asks the engines again; the next push takes all of them along"

    def __init__(
        self,
        message: str,
        *,
        version: str | None = None,
        engines: tuple[EngineState, ...] = (),
        tensor: str | None = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(message, tensor=tensor, next_step=next_step)
        self.version = version
        self.engines = engines

    def __str__(self) -> str:
        what = Exception.__str__(self)
        states = (replace(state, reason=None) if state.reason == what else state for state in self.engines)  # said once is enough
        lines = [what, *(f"  {state}" for state in states)]
        return "\n".join(lines + ([f"  next: {self.next_step}"] if self.next_step else []))


class EngineTimeout(SyncError):
    """A deadline passed."""

    next_step = "look at the engine's own log; `sync.status()` asks again, the next push takes it along once it answers"


class EngineLost(SyncError):
    """A process of the engine died."""

    next_step = "restart it, then push again or `sync.catch_up()`; `sync.catch_up(new_engine)` takes another in its place"


class ApplyError(SyncError):
    """The engine could not apply the bytes."""

    next_step = "push again: a full update heals a dirty engine"


class DigestMismatch(SyncError):
    """The bytes are not the trainer's."""

    next_step = "push again; if it repeats, suspect memory or a second writer of the shared segment"

    @classmethod
    def of(cls, name: str, got: int, sent: int, where: str = "") -> DigestMismatch:
        """Makes the error for a tensor that arrived, at `where`, with another digest than the
        trainer's."""
        return cls(f"{where}: " * bool(where) + f"{name} arrived with digest {got:016x}, the trainer sent {sent:016x}", tensor=name)

    @classmethod
    def changed(cls, tensor: str) -> DigestMismatch:
        """Makes the error for a tensor that the trainer has changed since the push began."""
        return cls(
            f"the trainer changed its weights while they were sent ({tensor} was read twice and differs)",
            tensor=tensor,
            next_step="push again, between optimizer steps: a full update heals a dirty engine",
        )


class CanaryError(SyncError):
    """The engine holds the trainer's bytes but computes other values: its derived state was not
    rebuilt."""

    next_step = "report the model and the versions that `instep doctor` prints; the engine refuses to generate until a push succeeds"


def by_name(kind: str) -> type[InstepError]:
    """Returns the class that a worker's `Fault.kind` names; `ApplyError` for an unknown name."""
    found = globals().get(kind)
    return found if isinstance(found, type) and issubclass(found, InstepError) else ApplyError
