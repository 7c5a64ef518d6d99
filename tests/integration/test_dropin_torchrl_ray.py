"""The drop-in for TorchRL over Ray, as TorchRL's page has it: trainer and engine are actors, and Ray is the way between them."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import SETTINGS
from models import tiny
from torchrl_actors import MemoryReceiver, Receiver, Trainer

from instep import MemoryEngine

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'instep[ray]'", allow_module_level=True)

import ray

WAIT = 300  # seconds: a process that starts on a machine that is busy


@pytest.fixture(scope="module")
def cluster(reference: Callable[..., Any]) -> Iterator[None]:
    # The engine within the actor's process: one import of vLLM fewer.
    environment = {**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


@pytest.fixture
def actors(cluster: None) -> Iterator[Callable[..., Any]]:
    """Starts a trainer and one receiver, which end with the test."""
    started: list[Any] = []

    def begin(kind: type[Receiver], folder: Any, concurrency: int = 4, **config: Any) -> tuple[Any, Any]:
        options = {"num_cpus": 0, "max_concurrency": concurrency}
        config = {"timeout": 60.0, **config}
        trainer = ray.remote(Trainer).options(name="Trainer", num_cpus=0, max_concurrency=4).remote(config, tiny("qwen3", 1))
        receiver = ray.remote(kind).options(**options).remote(config)
        started.extend([trainer, receiver])
        assert get(receiver.setup.remote(str(folder))) == "setup_complete"
        get(receiver.init_metadata.remote())
        return trainer, receiver

    yield begin
    for actor in started:
        ray.kill(actor)


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=WAIT)


def join(trainer: Any, receiver: Any) -> None:
    assert get([trainer.init.remote(receiver), receiver.init.remote()]) == ["initialized", "initialized"]


def fresh(seed: int) -> Any:
    engine = MemoryEngine(tiny("qwen3", seed).state_dict())
    return engine.fingerprint(), engine.generate([1, 2, 3], 4)


def test_the_pages_own_sequence(actors: Callable[..., Any], checkpoints: Callable[[str, int], Path], reference: Callable[..., Any]) -> None:
    trainer, receiver = actors(Receiver, checkpoints("qwen3", 1))
    join(trainer, receiver)
    for seed in (2, 3):
        get(trainer.update_weights.remote(seed))
        assert get(receiver.poll.remote())
        assert get(receiver.generate.remote()) == reference("qwen3", seed)
    get(receiver.inject.remote("step", 5))
    with pytest.raises(ray.exceptions.RayTaskError, match="told to fail in the middle"):
        get(trainer.update_weights.remote(2))
    with pytest.raises(ray.exceptions.RayTaskError, match="refuses to generate"):
        get(receiver.generate.remote())
    get(trainer.update_weights.remote(2))
    assert get(receiver.generate.remote()) == reference("qwen3", 2)


@pytest.mark.parametrize("point", ["hello", "prepare", "pause", "commit", "label", "resume"])
def test_an_engine_that_hangs_at_any_step(actors: Callable[..., Any], point: str) -> None:
    trainer, receiver = actors(MemoryReceiver, "", timeout=4.0)
    join(trainer, receiver)
    get(trainer.update_weights.remote(2))
    get(receiver.inject.remote(point, "hang"))
    started = time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError, match=f"did not answer {point} within 4 s"):
        get(trainer.update_weights.remote(3))
    assert time.monotonic() - started < 60
    get(trainer.update_weights.remote(2))
    assert get(receiver.generate.remote()) == fresh(2)


def test_an_engine_whose_actor_dies(actors: Callable[..., Any]) -> None:
    trainer, receiver = actors(MemoryReceiver, "")
    join(trainer, receiver)
    ray.kill(receiver)
    with pytest.raises(ray.exceptions.RayTaskError, match="gave no answer: ActorDied"):
        get(trainer.update_weights.remote(2))


def test_a_trainer_whose_actor_dies_with_the_engine_paused(actors: Callable[..., Any]) -> None:
    """Ray tells the engine nothing: it takes itself back when it was left alone for as long as the scheme's timeout."""
    trainer, receiver = actors(MemoryReceiver, "", timeout=4.0)
    join(trainer, receiver)
    get(receiver.slow_pause.remote(1.0))
    update = trainer.update_weights.remote(2)
    time.sleep(0.5)
    ray.kill(trainer)
    with pytest.raises(ray.exceptions.RayActorError):
        get(update)
    deadline = time.monotonic() + 60
    while (found := get(receiver.paused.remote())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not found
    assert get(receiver.generate.remote()) == fresh(1)


def test_an_actor_that_answers_one_call_at_a_time_is_told_so_on_both_sides(actors: Callable[..., Any]) -> None:
    trainer, receiver = actors(MemoryReceiver, "", concurrency=1, timeout=3.0)
    running = [receiver.init.remote(), trainer.init.remote(receiver)]
    with pytest.raises(ray.exceptions.RayTaskError, match="no trainer came within 3 s"):
        get(running[0])
    with pytest.raises(ray.exceptions.RayTaskError, match="needs max_concurrency of 2 or more"):
        get(running[1])
