"""Actors on a real Ray, with a real vLLM in them: made, asked, pushed to through their handles, and killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ARGUMENTS, SETTINGS
from models import PROMPTS, tiny
from plain_tokens import Tokens, length, trainer_logprobs

import instep
from instep import WeightSync
from instep.errors import ConfigError, EngineTimeout, SyncError
from instep.generation import Label, PromptId, PromptRequest, RewardConfig, Sampling

ray = pytest.importorskip("ray")
SOON = 120.0
LENGTH = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, here.parent, Path(instep.__file__).parents[1])))
    variables = {**SETTINGS, "PYTHONPATH": paths}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables}, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def ask(name: str, prompt: list[int], **sampling: Any) -> PromptRequest:
    settings = {"max_tokens": LENGTH, "ignore_eos": True, **sampling}
    return PromptRequest(
        id=PromptId("train", 0, name), prompt_token_ids=prompt, sampling=Sampling(**settings), labels=(Label("length", 1),)
    )


def create(folder: Path, **options: Any) -> list[Any]:
    from instep.generation.ray.engines import create_vllm_engines

    return create_vllm_engines(
        1,
        pretrain=str(folder),
        enforce_eager=True,
        max_model_len=ARGUMENTS["max_model_len"],
        engine_args={"load_format": "dummy", "max_num_seqs": 8, "skip_tokenizer_init": True},
        tokenizer=Tokens(),
        reward_config=RewardConfig(verifiers={"length": length}, verification_reward=1.0),
        **options,
    )


def follows(model: Any, engine: Any, name: str) -> None:
    """What the actor says and how likely it was, against the trainer's own forward."""
    requests = [ask(f"{name}-{index}", prompt, max_tokens=12) for index, prompt in enumerate(PROMPTS)]
    for result in ray.get([engine.generate.remote(request) for request in requests], timeout=SOON):
        sample = result.samples[0]
        expected = trainer_logprobs(model, result.request.prompt_token_ids, sample.token_ids, 1.0)
        assert max(abs(a - b) for a, b in zip(sample.logprobs, expected, strict=True)) < 0.15
        assert {span.version for span in sample.versions} == {name}


@pytest.mark.program
def test_an_actor_generates_takes_weights_in_flight_and_is_missed_when_it_dies(
    cluster: None, checkpoints: Callable[[str, int], Path]
) -> None:
    from ray.util.queue import Queue

    from instep.generation.ray.engines import ActorManager

    prompts, results = Queue(actor_options={"num_cpus": 0}), Queue(actor_options={"num_cpus": 0})
    manager = ray.remote(num_cpus=0)(ActorManager).remote()
    (engine,) = create(checkpoints("qwen3", 1), prompt_queue=prompts, results_queue=results, actor_manager=manager, timeout=300.0)
    assert ray.get(engine.kv_cache_info.remote(), timeout=SOON).samples == 16
    model = tiny("qwen3", 2)
    with WeightSync(model, engines=[engine], timeout=30.0) as sync:
        sync.push("v1")
        follows(model, engine, "v1")

        for index in range(24):
            prompts.put(ask(str(index), [index + 1, 2, 3], n=2))
        found = [results.get(timeout=SOON)]
        model.load_state_dict(tiny("qwen3", 3).state_dict())
        sync.push("v2")
        found += [results.get(timeout=SOON) for _ in range(23)]
        assert sorted(int(result.request.id.prompt) for result in found) == list(range(24))
        samples = [sample for result in found for sample in result.samples]
        assert [len(sample.token_ids) for sample in samples] == [LENGTH] * 48
        assert {sample.reward.score for sample in samples} == {float(LENGTH)}
        assert {tuple(span.version for span in sample.versions) for sample in samples} == {("v1",), ("v1", "v2"), ("v2",)}
        follows(model, engine, "v2")
        assert "engine-0" in ray.get(manager.status.remote(), timeout=SOON)["actors"]

        wrong = PromptRequest(id=PromptId("train", 0, "x"), prompt_token_ids=[1], tools=("saw",))
        with pytest.raises(ray.exceptions.RayTaskError) as refused:
            ray.get(engine.generate.remote(wrong), timeout=SOON)
        assert isinstance(refused.value.cause, ConfigError)

        pending = engine.generate.remote(ask("lost", [1, 2, 3]))
        ray.kill(engine)
        started = time.monotonic()
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(pending, timeout=SOON)
        with pytest.raises(SyncError) as lost:
            sync.push("v3")
        assert time.monotonic() - started < 60
        assert lost.value.engines[0].serving == "unknown"


def test_engines_that_the_cluster_has_no_room_for_are_an_error_in_time(cluster: None, checkpoints: Callable[[str, int], Path]) -> None:
    with pytest.raises(EngineTimeout, match="CPUs"):
        create(checkpoints("qwen3", 1), tensor_parallel_size=64, timeout=3.0)
