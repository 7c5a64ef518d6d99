"""The receipt of a push that has succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from instep.errors import EngineState
from instep.protocol import WorkerReceipt


@dataclass(frozen=True, slots=True)
class EngineReceipt:
    """One engine that serves the new version.

    pause, apply: seconds without generation, and of them in the slowest worker's loader.
    direct: layers whose regions are copied straight into live storage, in every worker that has
    them.
    rebuilt: layers made anew from copied regions by the engine's own hook.
    reload: layers that take the engine's reload session, and why. These three say what the next
        push does: the first one gives every layer to the session, and shows which may leave it.
    read_back: tensors compared bit for bit in the engine's own storage, in the worker that has
    least of them.
    unproved: layers of which that cannot be done, and why: the engine's own loader was given the
        right bytes, and what it made of them is taken on trust.
    compared: layers that the first push has compared with what the engine's initial load makes of
    them.
    initial: seconds that it took, of `apply`; 0 in other pushes, and where all of it came before
    the pause.
    """

    engine: str
    pause: float
    apply: float
    direct: tuple[str, ...]
    rebuilt: tuple[str, ...]
    reload: dict[str, str]
    read_back: int
    unproved: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    initial: float = 0.0

    @classmethod
    def of(cls, engine: str, pause: float, workers: Sequence[WorkerReceipt]) -> EngineReceipt:
        slowest = max(workers, key=lambda worker: worker.seconds["apply"])
        reload = {layer: why for worker in workers for layer, why in worker.reload.items()}
        rebuilt = {layer for worker in workers for layer in worker.rebuilt} - reload.keys()
        direct = {layer for worker in workers for layer in worker.direct} - reload.keys() - rebuilt
        ways = tuple(sorted(direct)), tuple(sorted(rebuilt)), dict(sorted(reload.items()))
        unproved = {layer: why for worker in workers for layer, why in worker.unproved.items()}
        read_back, compared = min(worker.read_back for worker in workers), min(worker.compared for worker in workers)
        initial = slowest.seconds.get("initial", 0.0)
        return cls(engine, pause, slowest.seconds["apply"], *ways, read_back, unproved, compared, initial)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Every engine named in `engines` serves `version`, and its bytes are the trainer's: `digest`
    is the sum over all tensors.

    seconds: by phase: describe, connect, plan, publish, prepare, commit, canary, total.
    pause: the longest time that an engine did not generate.
    canary_gap: largest difference of a log-probability between engines and trainer; None without a
    canary.
    non_finite: tensors that hold a NaN or an infinity; they were sent all the same.
    transport, why: how the bytes travelled, and what spoke against faster ways.
    failed: engines that a push with `require="any"` did not reach.
    """

    version: str
    nbytes: int
    tensors: int
    seconds: dict[str, float]
    digest: str
    engines: tuple[EngineReceipt, ...]
    canary_gap: float | None = None
    non_finite: tuple[str, ...] = ()
    failed: tuple[EngineState, ...] = field(default=())
    transport: str = ""
    why: str = ""

    @property
    def pause(self) -> float:
        return max((engine.pause for engine in self.engines), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain JSON types."""
        return asdict(self) | {"pause": self.pause}

    def __str__(self) -> str:
        if not (self.engines or self.failed):
            return f"{self.version}: every engine serves it already"
        phases = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in self.seconds.items() if name != "total")
        lines = [
            f"{self.version}: {self.nbytes / 1e6:.0f} MB in {self.tensors} tensors to {len(self.engines)} "
            f"engine{'s' * (len(self.engines) != 1)} in {1e3 * self.seconds['total']:.0f} ms ({phases}), "
            f"paused {1e3 * self.pause:.0f} ms, digest {self.digest}"
            + (f", canary gap {self.canary_gap:.2g}" if self.canary_gap is not None else "")
        ]
        if self.non_finite:
            lines.append(f"  not finite: {', '.join(self.non_finite[:5])}{' ...' * (len(self.non_finite) > 5)}")
        for engine in self.engines:
            if engine.unproved:
                layer, why = next(iter(sorted(engine.unproved.items())))
                more = f" and {len(engine.unproved) - 1} more" if len(engine.unproved) > 1 else ""
                lines.append(f"  {engine.engine}: not proved beyond its loader: {layer}{more} ({why})")
        return "\n".join([*lines, *(f"  not reached: {state}" for state in self.failed)])
