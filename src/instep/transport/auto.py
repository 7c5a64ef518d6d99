"""The choice of a transport, made anew for each version, and told with its reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from instep.errors import ConfigError, TransportError
from instep.protocol import Identity, TensorMeta
from instep.transport import Published, Transport
from instep.transport.registry import TRANSPORTS

logger = logging.getLogger("instep")


SKIPPED = 63
"""The most pushes for which a transport that engines could not open is left out."""


@dataclass
class _Refused:
    """A transport whose last publication engines could not open. The reason may pass, such as too
    many open files in a process. So the transport is tried again, after twice as many pushes each
    time."""

    reason: str
    times: int = 0
    skipped: int = 0  # how many more pushes go without it

    def once_more(self, reason: str) -> None:
        self.reason, self.skipped = reason, min(2**self.times - 1, SKIPPED)
        self.times += 1

    def __str__(self) -> str:
        pushes = f"{self.skipped} more push{'es' * (self.skipped > 1)}" if self.skipped else ""
        return f"{self.reason} (tried again {f'after {pushes}' if pushes else 'with the next push'})"


class AutoTransport:
    """Uses the first of its candidates that reaches every engine. Candidates are asked from the
    fastest to the most general.

    only: the name of one candidate, or `auto`. every: the candidates by name; by default those of a
    trainer in one process. Raises `ConfigError` where none of them has that name.
    """

    def __init__(self, only: str, timeout: float, every: Mapping[str, Transport] | None = None) -> None:
        every = every or {name: ends.publish(timeout) for name, ends in TRANSPORTS.items()}
        self.candidates = {name: every[name] for name in every if only in ("auto", name)}
        if not self.candidates:
            raise ConfigError(f"this trainer has no transport {only!r}", next_step=f"one of auto, {', '.join(every)}")
        self.refused: dict[str, _Refused] = {}
        self.left_out: set[str] = set()  # in this push
        self.used: Transport | None = None
        self.told: str | None = None
        self.against = ""
        """Why the last choice passed over faster transports."""
        self.closed = False

    def publish(
        self,
        tensors: list[TensorMeta],
        values: Iterable[tuple[str, torch.Tensor]],
        device: torch.device,
        workers: Sequence[Identity],
    ) -> Published:
        """Publishes a version by the first candidate that can bring it. values: on `device`; one
        candidate after the other reads them.

        Raises `TransportError` with every candidate's reason where none is left, `SourceError` as
        `Transport.publish` does.
        """
        if self.closed:
            raise TransportError("the WeightSync was closed", next_step="make a new one")
        against: dict[str, str] = {}
        for name, candidate in self.candidates.items():
            reason = str(self.refused[name]) if name in self.left_out else candidate.why_not(device, workers)
            if reason is None:
                try:
                    published = candidate.publish(tensors, values)
                except TransportError as error:
                    if len(self.candidates) == 1:
                        raise
                    reason = str(error.args[0])
                else:
                    self.used = candidate
                    self._tell(name, against)
                    return published
            against[name] = reason
        raise TransportError(f"no transport reaches the engines: {_listed(against)}")

    def give_up(self, error: TransportError, failures: Sequence[Exception | None]) -> bool:
        """Notes that engines cannot open what was published last. Returns whether there is another
        candidate, which the next publication takes.

        failures: one for each engine. An engine that fails for a reason other than the transport
        would fail with every candidate.
        """
        *others, last = self.candidates
        other = any(not isinstance(failure, TransportError | None) for failure in failures)
        if other or (used := self._used()) not in others or last in self.left_out:
            return False
        self.refused.setdefault(used, _Refused("")).once_more(str(error.args[0]))
        self.left_out.add(used)
        return True

    def reached(self) -> None:
        """Notes that engines have opened what was published last."""
        self.refused.pop(self._used(), None)

    def _used(self) -> str:
        return next(name for name, candidate in self.candidates.items() if candidate is self.used)

    def use(self, name: str) -> None:
        """Chooses the candidate whose publication workers are about to read, be it the last one or
        an earlier one."""
        self.used = self.candidates[name]

    def begin(self) -> None:
        """Begins another push. Candidates that engines refused are left out of it or tried
        again."""
        self.left_out = {name for name, refused in self.refused.items() if refused.skipped}
        for name in self.left_out:
            self.refused[name].skipped -= 1

    def prefetch(self) -> None:
        if self.used is not None:
            self.used.prefetch()

    @property
    def digests_apart(self) -> bool:
        assert self.used is not None
        return self.used.digests_apart

    @property
    def digests_before_commit(self) -> bool:
        assert self.used is not None
        return self.used.digests_before_commit

    def serving(self, step: str) -> Any:
        assert self.used is not None
        return self.used.serving(step)

    def finish(self, published: Published) -> Published:
        assert self.used is not None
        return self.used.finish(published)

    def release_all_but(self, held: Set[str]) -> None:
        for candidate in self.candidates.values():
            candidate.release_all_but(held)

    def close(self) -> None:
        self.closed = True
        for candidate in self.candidates.values():
            candidate.close()

    def _tell(self, name: str, against: dict[str, str]) -> None:
        self.against = _listed(against)
        choice = f"{name}: {self.against}" if against else name
        if choice != self.told:
            logger.info("transport %s", choice)
            self.told = choice


def _listed(against: dict[str, str]) -> str:
    return "; ".join(f"not {name}, because {reason}" for name, reason in against.items())
