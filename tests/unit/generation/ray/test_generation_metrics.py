"""Numbers of actors and queues for Ray's dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.serving import SOON, FakeServing, Fleet, wait

from instep.generation import ActorStatus, Label, RewardConfig
from instep.generation.exchange.ledger import LedgerSizes

pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")


class Recorded:
    """In the place of Ray's metrics."""

    values: ClassVar[dict[tuple[str, str | None], float]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
        assert description
        self.name, self.tag_keys, self.tags = name, tag_keys, dict[str, str]()

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.tags = tags

    @property
    def key(self) -> tuple[str, str | None]:
        return self.name, self.tags.get("actor")

    def set(self, value: float) -> None:
        self.values[self.key] = value

    def inc(self, value: float) -> None:
        assert value > 0  # which Ray insists on
        self.values[self.key] = self.values.get(self.key, 0) + value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None], float]:
    for kind in ("Gauge", "Counter"):
        monkeypatch.setattr(f"instep.generation.ray.metrics.{kind}", Recorded)
    monkeypatch.setattr(Recorded, "values", {})
    return Recorded.values


def status(**numbers: Any) -> ActorStatus:
    return ActorStatus(**{"name": "engine-0", "version": "v1", "prompts": 0, "samples": 0, "places": 8, "closed": [], **numbers})


def test_counters_grow_by_what_is_new_and_gauges_follow(recorded: dict[tuple[str, str | None], float]) -> None:
    from instep.generation.ray.metrics import ActorMetrics

    told = ActorMetrics("engine-0")
    told(status(tokens=10, answered=1, prompts=3))
    told(status(tokens=25, answered=1, prompts=2, errors=1, lag=2))
    found = {
        name: recorded.get((f"instep_{name}", "engine-0")) for name in ("tokens", "answered", "prompts", "errors", "lag", "places", "stale")
    }
    assert found == {"tokens": 25, "answered": 1, "prompts": 2, "errors": 1, "lag": 2, "places": 8, "stale": None}


def test_queues_tell_their_lengths(recorded: dict[tuple[str, str | None], float]) -> None:
    from instep.generation.ray.metrics import QueueMetrics

    QueueMetrics()(LedgerSizes(1, 2, 3, 4, 5))
    assert list(recorded.values()) == [1, 2, 3, 4, 5]
    assert ("instep_queue_waiting", None) in recorded


@pytest.fixture
def fleet(segments: Path) -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.stop()


def test_an_actor_counts_what_it_did(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.generation.actor.work.BEAT", 0.01)

    async def breaks(answer: Any, value: Any) -> float:
        raise ValueError("no verdict")

    seen: list[ActorStatus] = []
    actor = fleet.actor(FakeServing("abc"), observer=seen.append, reward_config=RewardConfig(verifiers={"breaks": breaks}))
    actor.submit(fleet.ask("a", n=2, labels=(Label("breaks", 1),))).result(SOON)
    actor.submit(fleet.ask("b")).result(SOON)
    wait(lambda: seen[-1].answered == 2)
    assert (seen[-1].tokens, seen[-1].errors, seen[-1].lag, seen[-1].prompts) == (9, 2, 0, 0)
