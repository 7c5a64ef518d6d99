"""The drop-in for TorchRL over Ray, as TorchRL's page has it: trainer and engine are actors, and Ray is the way between them."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import ARGUMENTS, SETTINGS, completion
from models import PROMPTS, tiny
from torchrl_actors import MemoryReceiver, Receiver, Trainer

from instep import MemoryEngine
from instep.dropin.torchrl import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, get_model_metadata
from instep.errors import ApplyError

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'instep[ray]'", allow_module_level=True)

import ray

WAIT = 300  # seconds: a process that starts on a machine that is busy

STEPS = ("prepare", "pause", "label", "resume")


@pytest.fixture(scope="module")
def cluster(reference: Callable[..., Any]) -> Iterator[None]:
    # Each engine within its actor's process: one import of vLLM fewer. The GPU, which `AsyncVLLM` asks for, is a number to Ray.
    environment = {**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


@contextmanager
def actors(kind: type[Receiver], folder: Any = "", concurrency: int = 4, **config: Any) -> Iterator[tuple[Any, Any]]:
    """A trainer and one receiver that knows its metadata."""
    name, config = f"Trainer-{uuid.uuid4().hex}", {"timeout": 60.0, **config}
    trainer = ray.remote(Trainer).options(name=name, num_cpus=0, max_concurrency=4).remote(config, tiny("qwen3", 1))
    receiver = ray.remote(kind).options(num_cpus=0, max_concurrency=concurrency).remote(config, name)
    try:
        assert get(receiver.setup.remote(str(folder))) == "setup_complete"
        get(receiver.init_metadata.remote())
        yield trainer, receiver
    finally:
        ray.kill(trainer)
        ray.kill(receiver)


@pytest.fixture(scope="module")
def impatient(cluster: None) -> Iterator[tuple[Any, Any]]:
    """An engine in memory, and a trainer that waits four seconds for it."""
    with actors(MemoryReceiver, timeout=4.0) as (trainer, receiver):
        join(trainer, receiver)
        yield trainer, receiver


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=WAIT)


def join(trainer: Any, receiver: Any) -> None:
    assert get([trainer.init.remote(receiver), receiver.init.remote()]) == ["initialized", "initialized"]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fresh(seed: int) -> Any:
    engine = MemoryEngine(tiny("qwen3", seed).state_dict())
    return engine.fingerprint(), engine.generate([1, 2, 3], 4)


def test_the_pages_own_sequence(cluster: None, checkpoints: Callable[[str, int], Path], reference: Callable[..., Any]) -> None:
    with actors(Receiver, checkpoints("qwen3", 1)) as (trainer, receiver):
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


def test_torchrls_own_engine(cluster: None, checkpoints: Callable[[str, int], Path], reference: Callable[..., Any], tmp_path: Path) -> None:
    """`AsyncVLLM`, by both schemes: what its actors generate through TorchRL's own interface is what a fresh engine generates."""
    pytest.importorskip("torchrl", reason="TorchRL is not installed: pip install 'instep[torchrl]'")
    from vllm import AsyncEngineArgs, SamplingParams

    from instep.dropin.torchrl.vllm_async import AsyncVLLM

    sampling = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
    arguments = {"worker_extension_cls": "faulty.FaultyExtension", "load_format": "dummy", "enable_prefix_caching": True, **ARGUMENTS}
    engine = AsyncVLLM.launch(AsyncEngineArgs(str(checkpoints("qwen3", 1)), **arguments))

    def generated() -> Any:
        return [completion(engine.generate({"prompt_token_ids": prompt}, sampling)) for prompt in PROMPTS]

    try:
        assert generated() != reference("qwen3", 2)
        scheme = VLLMWeightSyncScheme()
        sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
        sender.register_model(model := tiny("qwen3", 2))
        metadata = get_model_metadata(model)
        sender.init_all_workers_group(metadata, vllm_engine=engine)
        receiver.init_all_workers_group(metadata)
        sender.update_weights()
        assert generated() == reference("qwen3", 2)
        model.load_state_dict(tiny("qwen3", 3).state_dict())
        sender.update_weights()
        assert generated() == reference("qwen3", 3)
        get(engine.collective_rpc("inject", args=("step", 5)))
        with pytest.raises(ApplyError):
            sender.update_weights(tiny("qwen3", 2))
        with pytest.raises(Exception, match="refuses to generate"):
            generated()

        buffers = VLLMDoubleBufferSyncScheme(str(tmp_path))
        buffers.create_sender().update_weights(tiny("qwen3", 2))
        assert buffers.create_receiver(engine).poll_and_apply()
        assert generated() == reference("qwen3", 2)
    finally:
        engine.shutdown()


# An engine that is known is not asked who it is.
@pytest.mark.parametrize("point", ["commit", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in STEPS)])
def test_an_engine_that_hangs_at_any_step(impatient: tuple[Any, Any], point: str) -> None:
    trainer, receiver = impatient
    get(trainer.update_weights.remote(2))
    get(receiver.inject.remote(point, "hang"))
    started = time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError, match=f"did not answer {point} within 4 s"):
        get(trainer.update_weights.remote(3))
    assert time.monotonic() - started < 60
    get(trainer.update_weights.remote(2))
    assert get(receiver.generate.remote()) == fresh(2)


def test_a_trainer_whose_actor_dies_with_the_engine_paused(impatient: tuple[Any, Any]) -> None:
    """Ray tells the engine nothing: it takes itself back when it was left alone for as long as the scheme's timeout."""
    trainer, receiver = impatient
    get(trainer.update_weights.remote(2))
    get(receiver.slow_pause.remote(2.0))
    update = trainer.update_weights.remote(3)
    until(lambda: get(receiver.paused.remote()))
    ray.kill(trainer)
    with pytest.raises(ray.exceptions.RayActorError):
        get(update)
    until(lambda: not get(receiver.paused.remote()))
    assert get(receiver.generate.remote()) == fresh(2)


def test_an_engine_whose_actor_dies(cluster: None) -> None:
    with actors(MemoryReceiver) as (trainer, receiver):
        join(trainer, receiver)
        ray.kill(receiver)
        with pytest.raises(ray.exceptions.RayTaskError, match="gave no answer: ActorDied"):
            get(trainer.update_weights.remote(2))


def test_an_actor_that_answers_one_call_at_a_time_is_told_so_on_both_sides(cluster: None) -> None:
    with actors(MemoryReceiver, concurrency=1, timeout=3.0) as (trainer, receiver):
        running = [receiver.init.remote(), trainer.init.remote(receiver)]
        with pytest.raises(ray.exceptions.RayTaskError, match="no trainer came within 3 s"):
            get(running[0])
        with pytest.raises(ray.exceptions.RayTaskError, match="needs max_concurrency of 2 or more"):
            get(running[1])
