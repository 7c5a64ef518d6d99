"""What a server counts of the pushes that reach its engine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from helpers.asgi import TOKEN, asgi_engine
from helpers.toys import checkpoint
from prometheus_client import CollectorRegistry

from instep import MemoryEngine, WeightSync
from instep.engine.remote.http_control import Served
from instep.errors import InstepError
from instep.metrics import Lag, metrics

pytestmark = pytest.mark.usefixtures("segments")

START, NEXT = checkpoint(0, layers=1), checkpoint(1, layers=1)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine(START)


@pytest.fixture
def served(engine: MemoryEngine, registry: CollectorRegistry) -> Served:
    return Served(engine, TOKEN, metrics=metrics(registry))


def sync(served: Served) -> WeightSync:
    return WeightSync(NEXT, [asgi_engine(served)])


def syncs(registry: CollectorRegistry) -> dict[str, float]:
    samples = [one for metric in registry.collect() if metric.name == "instep_syncs" for one in metric.samples]
    return {one.labels["outcome"]: one.value for one in samples if one.name == "instep_syncs_total"}


def status(served: Served) -> dict[str, Any]:
    return asyncio.run(served.status())


def test_a_push_that_worked(served: Served, registry: CollectorRegistry) -> None:
    with sync(served) as trainer:
        receipt = trainer.push("v1")
    assert syncs(registry) == {"ok": 1}
    assert registry.get_sample_value("instep_sync_bytes_total", {"transport": "shm"}) == receipt.nbytes
    for phase in ("trace", "prepare", "commit", "total"):
        assert registry.get_sample_value("instep_sync_duration_seconds_count", {"phase": phase}) == 1, phase
    assert registry.get_sample_value("instep_pause_seconds_count", {"engine": "memory"}) == 1
    assert registry.get_sample_value("instep_version_lag", {"engine": "memory"}) == 0
    assert registry.get_sample_value("instep_digest_mismatches_total") == 0
    found = status(served)
    assert found["last_pause"] == pytest.approx(registry.get_sample_value("instep_pause_seconds_sum", {"engine": "memory"}))
    assert 0 < found["last_pause"] <= receipt.pause
    assert found["lag"] == 0


@pytest.mark.parametrize(
    ("point", "outcome", "mismatches"), [("digest", "DigestMismatch", 1), ("commit", "EngineLost", 0), ("tensor", "ApplyError", 0)]
)
def test_a_push_that_failed_leaves_the_engine_one_version_behind(
    served: Served, engine: MemoryEngine, registry: CollectorRegistry, point: Any, outcome: str, mismatches: int
) -> None:
    with sync(served) as trainer:
        engine.inject(point, tensor=3)
        with pytest.raises(InstepError):
            trainer.push("v1")
        assert syncs(registry) == {outcome: 1}
        assert registry.get_sample_value("instep_digest_mismatches_total") == mismatches
        assert status(served)["lag"] == 1
        trainer.push("v2")
    assert syncs(registry) == {outcome: 1, "ok": 1}
    assert status(served)["lag"] == 0


def test_a_push_that_failed_elsewhere_was_aborted_here(served: Served, registry: CollectorRegistry) -> None:
    other = MemoryEngine(START, name="other")
    other.inject("prepare")
    with WeightSync(NEXT, [asgi_engine(served), other]) as trainer, pytest.raises(InstepError):
        trainer.push("v1")
    assert syncs(registry) == {"aborted": 1}
    assert registry.get_sample_value("instep_version_lag", {"engine": "memory"}) == 1


def test_a_second_trainer_that_is_turned_away_changes_nothing(served: Served, registry: CollectorRegistry) -> None:
    """Its version is none for this engine, and the first trainer's push is still counted when it ends."""
    asked = asgi_engine(served)
    with WeightSync(NEXT, [asked]) as first, WeightSync(START, [asgi_engine(served)]) as second:
        first.push("v1")

        async def both() -> None:
            call = served.engine.call

            async def between(method: Any, payload: bytes) -> Any:
                if method == "commit":
                    served.engine.call = call  # type: ignore[method-assign]
                    with pytest.raises(InstepError, match="another trainer is pushing"):
                        await second.apush("mine")
                return await call(method, payload)

            served.engine.call = between  # type: ignore[method-assign]
            await first.apush("v2")

        asyncio.run(both())
    assert syncs(registry) == {"ok": 2}
    assert status(served)["lag"] == 0


def test_a_worker_that_is_silent_is_counted(served: Served, engine: MemoryEngine, registry: CollectorRegistry) -> None:
    with WeightSync(NEXT, [asgi_engine(served)], timeout=20) as trainer:
        trainer.push("v1")
        served.endpoint.timeout = trainer._session.fleet.members[0].timeout = 0.5
        engine.inject("prepare", "hang")
        with pytest.raises(InstepError):
            trainer.push("v2")
    deadline = time.monotonic() + 20
    while syncs(registry) != {"ok": 1, "EngineTimeout": 1}:  # the server gives up a moment after its trainer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert status(served)["lag"] == 1


def test_without_metrics_the_status_is_the_same(engine: MemoryEngine) -> None:
    served = Served(engine, TOKEN)
    with sync(served) as trainer:
        trainer.push("v1")
    assert status(served)["last_pause"] > 0


def test_lag_counts_a_version_that_is_tried_again_once() -> None:
    lag = Lag()
    for version in ("a", "b", "b", "c"):
        lag.begin(version)
    assert len(lag) == 3
    lag.serve("b")
    assert lag.begun == ["c"]
    lag.begin("b")
    assert lag.begun == ["c"]
    lag.serve("from another trainer")
    assert len(lag) == 0
