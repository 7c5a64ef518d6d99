"""Actors on a real Ray that counts GPUs which are not there: which actor gets which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.ray_fleet import SOON, Trainer, environment, fake_vllm, gpus_of, group_of, until

from instep.errors import ConfigError, EngineTimeout

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=environment())
    yield
    ray.shutdown()


@pytest.fixture
def fleet(cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.util.placement_group import remove_placement_group

    monkeypatch.setattr("instep.generation.ray.engines.start_vllm", fake_vllm)
    made: list[Any] = []

    def create(count: int, **options: Any) -> list[Any]:
        from instep.generation.ray.engines import create_vllm_engines

        made.extend(create_vllm_engines(count, pretrain="", **{"timeout": SOON, **options}))
        return made[-count:]

    yield create
    groups = [ray.get(engine.__ray_call__.remote(group_of), timeout=SOON) for engine in made]
    for engine in made:
        ray.kill(engine)
    for group in groups:
        remove_placement_group(group)
    until(lambda: ray.available_resources().get("GPU") == 4)


def ask(actors: list[Any], question: Any) -> list[Any]:
    found: list[Any] = ray.get([actor.__ray_call__.remote(question) for actor in actors], timeout=SOON)
    return found


def test_each_engine_has_gpus_of_its_own_for_all_its_workers(fleet: Any) -> None:
    found = ask(fleet(2, tensor_parallel_size=2), gpus_of)
    assert sorted(gpu for ids, _ in found for gpu in ids) == ["0", "1", "2", "3"]
    assert [visible for _, visible in found] == [",".join(ids) for ids, _ in found]


def test_where_ray_leaves_the_choice_of_gpus_the_actor_makes_it(fleet: Any) -> None:
    found = ask(fleet(2, environment={"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}), gpus_of)
    assert [visible for _, visible in found] == [",".join(ids) for ids, _ in found]
    assert len({visible for _, visible in found}) == 2


def test_an_engine_shares_its_gpu_with_the_trainer_of_its_bundle(fleet: Any) -> None:
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"GPU": 1, "CPU": 1}] * 2)
    assert group.wait(SOON)

    trainers = [
        ray.remote(Trainer).options(num_gpus=0.48, num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for index in range(2)
    ]
    engines = fleet(2, pg=group)
    assert [ids for ids, _ in ask(engines, gpus_of)] == ray.get([trainer.gpus.remote() for trainer in trainers], timeout=SOON)
    for wrong in ({"tensor_parallel_size": 2}, {"num_engines": 3}):
        with pytest.raises(ConfigError):
            fleet(wrong.pop("num_engines", 1), pg=group, **wrong)


def test_gpus_that_are_not_to_be_had_are_an_error_in_time_and_leave_nothing(fleet: Any) -> None:
    with pytest.raises(EngineTimeout, match=r"3 times 2 GPUs .* 4 of 4 GPUs"):
        fleet(3, tensor_parallel_size=2, timeout=2.0)
    assert len(fleet(2, tensor_parallel_size=2)) == 2
