"""Open Instruct's drop-in between real Ray actors, in a group that Ray knows by its name too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dropins import free_port
from models import PROMPTS
from ray_actors import GROUP, Engine, Member, Trainer

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
FAMILY = "llama"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    paths = [*map(str, (Path(__file__).parent, Path(__file__).parents[1])), os.environ.get("PYTHONPATH", "")]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ":".join(paths)}})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def actors(checkpoints: Callable[[str, int], Path]) -> tuple[Any, Any]:
    return ray.remote(Engine).remote(str(checkpoints(FAMILY, 1))), ray.remote(Trainer).remote(FAMILY)


def join(engine: Any, trainer: Any, use_ray: bool) -> None:
    port = free_port()
    joining = engine.init_process_group.remote("127.0.0.1", port, 1, 2, GROUP, "gloo", use_ray=use_ray, timeout_minutes=0.5)
    ray.get(trainer.init_process_group.remote(port, use_ray), timeout=60)
    assert ray.get(joining, timeout=60)[0]["ok"]


def test_rays_own_functions_reach_the_group() -> None:
    pair, port = [ray.remote(num_cpus=0)(Member).remote() for _ in range(2)], free_port()
    ray.get([member.enter.remote(port, rank, "gloo") for rank, member in enumerate(pair)], timeout=60)
    found = ray.get([member.collectives.remote() for member in pair], timeout=60)
    assert found == [[[1.0, 2.0, 3.0], [3.0] * 3, [7.0] * 3]] * 2
    for member in pair:
        ray.kill(member)


@pytest.mark.parametrize("use_ray", [True, False])
def test_an_engine_follows_a_trainer(actors: tuple[Any, Any], reference: Callable[..., Any], use_ray: bool) -> None:
    engine, trainer = actors
    ray.get(engine.generate.remote(), timeout=400)
    join(engine, trainer, use_ray)
    for seed in (2, 3):
        assert ray.get(ray.get(trainer.bring.remote(seed, [engine]), timeout=120)) == []  # nothing is left to wait for
        tokens, logprobs = zip(*ray.get(engine.generate.remote(), timeout=120), strict=True)
        assert list(zip(tokens, logprobs, strict=True)) == reference(FAMILY, seed)
    assert len(tokens) == len(PROMPTS)


def test_an_engine_that_dies_is_told_to_the_trainer(actors: tuple[Any, Any]) -> None:
    """Last in this file."""
    engine, trainer = actors
    ray.get(engine.die_at_the_next_tensor.remote(), timeout=60)
    started = time.monotonic()
    with pytest.raises(Exception, match=r"1 of 1 engines failed") as failure:
        ray.get(trainer.bring.remote(2, [engine]), timeout=120)
    assert "does not answer" in str(failure.value)
    assert time.monotonic() - started < 60
