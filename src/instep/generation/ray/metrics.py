"""Metrics of actors and queues in Ray's dashboard and Prometheus. Ray adds the prefix `ray_`,
and `_total` to counters.

A rate over `instep_tokens` is tokens per second. Each actor's numbers are tagged with its name.
"""

from __future__ import annotations

from instep.extras import needed_by
from instep.generation.actor.manager import ActorStatus
from instep.generation.exchange.ledger import LedgerSizes

with needed_by("a fleet of actors"):
    from ray.util.metrics import Counter, Gauge

GAUGES = {
    "prompts": "prompts under way, from taking them to handing over their result",
    "samples": "samples that hold a place in the engine",
    "places": "places for samples in the engine",
    "lag": "versions that the oldest token of the last result is behind what the actor serves",
}
COUNTERS = {
    "answered": "prompts with a result",
    "tokens": "tokens sampled",
    "stale": "results that were too old, and made again",
    "errors": "samples that ended in an error or have no score because a verifier broke",
}
QUEUES = {
    "waiting": "prompts that wait for an actor",
    "taken": "prompts with an actor",
    "results": "results that wait for the trainer",
    "eval_results": "results of the evaluation that wait",
    "reissued": "prompts that were taken back from actors that died or stopped",
}


class ActorMetrics:
    def __init__(self, actor: str) -> None:
        tags = {"actor": actor}
        self._gauges = {name: Gauge(f"instep_{name}", text, ("actor",)) for name, text in GAUGES.items()}
        self._counters = {name: Counter(f"instep_{name}", text, ("actor",)) for name, text in COUNTERS.items()}
        for metric in (*self._gauges.values(), *self._counters.values()):
            metric.set_default_tags(tags)
        self._counted = dict.fromkeys(COUNTERS, 0)

    def __call__(self, status: ActorStatus) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(getattr(status, name))
        for name, counter in self._counters.items():
            count = getattr(status, name)
            if count > self._counted[name]:
                counter.inc(count - self._counted[name])
                self._counted[name] = count


class QueueMetrics:
    def __init__(self) -> None:
        self._gauges = {name: Gauge(f"instep_queue_{name}", text) for name, text in QUEUES.items()}

    def __call__(self, sizes: LedgerSizes) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(getattr(sizes, name))
