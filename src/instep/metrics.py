"""Prometheus metrics, the same for a trainer (`telemetry.prometheus`) and for an inference
server (`engine.observed`).

What each side measures is in docs/metrics.md. Needs `prometheus_client`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from instep.extras import needed_by

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Seconds. A pause of a small model on one GPU is some milliseconds, a first push of a large one
minutes."""


class Metrics:
    """All metrics of one registry."""

    def __init__(self, registry: Any) -> None:
        with needed_by("Prometheus metrics"):
            from prometheus_client import Counter, Gauge, Histogram

        named = {"registry": registry}
        self.seconds = Histogram("instep_sync_duration_seconds", "Duration of each phase of a push", ["phase"], buckets=BUCKETS, **named)
        self.bytes = Counter("instep_sync_bytes", "Bytes of versions that engines took", ["transport"], **named)
        self.pause = Histogram(
            "instep_pause_seconds", "Time an engine did not generate during a push", ["engine"], buckets=BUCKETS, **named
        )
        self.lag = Gauge(
            "instep_version_lag", "Versions begun since the one that the engine serves", ["engine"], multiprocess_mode="mostrecent", **named
        )
        self.mismatches = Counter("instep_digest_mismatches", "Pushes that ended because bytes were not the trainer's", **named)
        self.syncs = Counter("instep_syncs", "Pushes by outcome", ["outcome"], **named)

    def ended(self, outcome: str) -> None:
        """Counts a push that has ended. outcome: `ok`, or how else it ended."""
        self.syncs.labels(outcome).inc()
        if outcome == "DigestMismatch":
            self.mismatches.inc()


_made: WeakKeyDictionary[Any, Metrics] = WeakKeyDictionary()


def metrics(registry: Any = None) -> Metrics:
    """Returns the metrics of a registry (default: prometheus_client's own). Each registry has
    one object: it refuses a second metric of one name.

    Raises `MissingExtra` without the extra `metrics`.
    """
    with needed_by("Prometheus metrics"):
        from prometheus_client import REGISTRY

    registry = registry or REGISTRY
    if registry not in _made:
        _made[registry] = Metrics(registry)
    return _made[registry]


class Lag:
    """Counts the versions begun since the one that an engine serves. A version that is tried
    again counts once."""

    def __init__(self) -> None:
        self.served: str | None = None
        self.begun: list[str] = []

    def __len__(self) -> int:
        return len(self.begun)

    def begin(self, version: str) -> None:
        if version not in (self.served, *self.begun):
            self.begun.append(version)

    def serve(self, version: str) -> None:
        self.served = version
        self.begun = self.begun[self.begun.index(version) + 1 :] if version in self.begun else []
