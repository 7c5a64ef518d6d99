"""Actors on a real Ray with engines in memory: what becomes of prompts when actors die."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.ray_fleet import SOON, collect, environment, fake_vllm, once, ready, restart, until
from helpers.rollouts import encode
from helpers.serving import weights

from instep import WeightSync
from instep.errors import ConfigError
from instep.generation import PromptId, PromptRequest, Sampling

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=environment())
    yield
    ray.shutdown()


@pytest.fixture
def fleet(cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes actors that end with the test."""
    monkeypatch.setattr("instep.generation.ray.engines.start_vllm", fake_vllm)
    made: list[Any] = []

    def create(count: int, **options: Any) -> list[Any]:
        from instep.generation.ray.engines import create_vllm_engines

        made.extend(create_vllm_engines(count, pretrain="", timeout=SOON, **options))
        return made[-count:]

    yield create
    for engine in made:
        ray.kill(engine)


def queues(**limits: int) -> Any:
    from instep.generation.ray.engines import RolloutQueues

    return RolloutQueues(**limits)


def ask(name: int, n: int = 2) -> PromptRequest:
    return PromptRequest(id=PromptId("train", 0, str(name)), prompt_token_ids=encode("say"), sampling=Sampling(n=n, max_tokens=100))


def put(ports: Any, count: int) -> list[PromptId]:
    for name in range(count):
        ports.prompts.put(ask(name))
    return [PromptId("train", 0, str(name)) for name in range(count)]


def test_an_actor_that_is_killed_loses_no_prompt_and_its_successor_serves_the_current_version(fleet: Any) -> None:
    ports = queues()
    options = {"prompt_queue": ports.prompts, "results_queue": ports.results, "max_restarts": 1}
    first, second = fleet(2, **options)
    with WeightSync(weights(2), [first, second]) as sync:
        sync.push("v1")
        ids = put(ports, 30)
        found = collect(ports.results, 3, sync)
        until(lambda: ray.get(first.status.remote(), timeout=SOON).prompts >= 2)
        restart(first)
        found += collect(ports.results, 27, sync)
        once(found, ids, 2)
        assert ports.sizes().reissued >= 1
        spans = {tuple((span.version, span.start, span.end) for span in sample.versions) for result in found for sample in result.samples}
        assert spans == {(("v1", 0, 10),)}
        until(lambda: ready(first))
        sync.catch_up()
        assert {state.version for state in sync.status()} == {"v1"}
        ids = put(ports, 30)
        once(collect(ports.results, 30, sync), ids, 2)
        assert ray.get(first.status.remote(), timeout=SOON).answered > 0
        sync.push("v2")


def test_an_actor_that_comes_back_takes_no_prompt_before_it_has_the_weights(fleet: Any) -> None:
    ports = queues()
    (only,) = fleet(1, prompt_queue=ports.prompts, results_queue=ports.results, max_restarts=1)
    with WeightSync(weights(2), [only]) as sync:
        sync.push("v1")
        restart(only)
        until(lambda: ready(only))
        ids = put(ports, 1)
        with pytest.raises(queue.Empty):
            ports.results.get(timeout=1.0)
        assert ray.get(only.status.remote(), timeout=SOON).version is None
        found = collect(ports.results, 1, sync)
        once(found, ids, 2)
        assert found[0].samples[0].versions[0].version == "v1"


def test_a_new_actor_takes_a_dead_ones_place(fleet: Any) -> None:
    ports = queues()
    options = {"prompt_queue": ports.prompts, "results_queue": ports.results}
    (old,) = fleet(1, **options)
    with WeightSync(weights(2), [old]) as sync:
        sync.push("v1")
        ids = put(ports, 6)
        found = collect(ports.results, 1, sync)
        ray.kill(old)
        (new,) = fleet(1, await_weights=True, **options)
        assert [state.serving for state in sync.status()] == ["unknown"]
        sync.catch_up(new)
        found += collect(ports.results, 5, sync)
        once(found, ids, 2)
        assert {span.version for result in found for sample in result.samples for span in sample.versions} == {"v1"}


def test_what_a_stopped_actor_had_goes_to_another(fleet: Any) -> None:
    ports = queues()
    options = {"prompt_queue": ports.prompts, "results_queue": ports.results}
    first, second = fleet(2, **options)
    with WeightSync(weights(2), [first, second]) as sync:
        sync.push("v1")
        ids = put(ports, 20)
        until(lambda: ray.get(first.status.remote(), timeout=SOON).prompts >= 2)
        left = ray.get(first.stop.remote(drain=False), timeout=SOON)
        assert left
        once(collect(ports.results, 20, sync), ids, 2)
        assert ports.sizes().reissued == len(left)


def test_results_that_are_too_old_are_made_again(fleet: Any) -> None:
    ports = queues()
    (only,) = fleet(1, prompt_queue=ports.prompts, results_queue=ports.results, max_staleness=0)
    with WeightSync(weights(2), [only]) as sync:
        sync.push("v0")
        ids = put(ports, 12)
        found = []
        for step in range(1, 4):
            found += collect(ports.results, 2, sync)
            time.sleep(0.1)  # the next ones are half way
            sync.push(f"v{step}")
        found += collect(ports.results, 6, sync)
        once(found, ids, 2)
        samples = [sample for result in found for sample in result.samples]
        assert {len(sample.versions) for sample in samples} == {1}  # those that a push has met are not among them
        assert {sample.versions[0].version for sample in samples} >= {"v0", "v3"}
        assert ray.get(only.status.remote(), timeout=SOON).stale > 0


def test_the_queues_are_bounded_and_refuse_a_prompt_twice(cluster: None) -> None:
    ports = queues(max_prompts=1)
    ports.prompts.put(ask(0))
    with pytest.raises(queue.Full):
        ports.prompts.put(ask(1), timeout=0.1)
    assert ports.prompts.get().id.prompt == "0"
    with pytest.raises(ConfigError, match="on its way"):
        ports.prompts.put(ask(0))
    with pytest.raises(queue.Empty):
        ports.prompts.get(block=False)
