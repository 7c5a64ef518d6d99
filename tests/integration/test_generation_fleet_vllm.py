"""Two actors on a real Ray, with a real vLLM and SmolLM2-135M each: prompts with tools while weights are pushed, Open Instruct's trainer, a
death."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from dropins import free_port
from engines import SETTINGS
from helpers.ray_fleet import collect, environment, once, ready, restart, until
from plain_tokens import Add, OnceParser, Tokens, length, trainer_logprobs

from instep import WeightSync
from instep.demo.model import load, smollm2
from instep.generation import Label, PromptId, PromptRequest, RewardConfig, Sampling
from instep.generation.types import GenerationResult, Sample

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")

SOON = 240.0
CLOSE = 0.01  # nats between vLLM's kernels and transformers', both in float32, largest of all tokens
APART = 0.05  # nats between models of two seeds, mean over tokens
NOISE = 0.05  # of a matrix's own spread: what a seed adds to it
LENGTH = 24
ENDS = (".", ",", "\n", " the", " of", " and")
"""The last token of each ends a turn."""


class Fleet:
    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        from instep.generation.ray.engines import RolloutQueues, create_vllm_engines

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.ends = tuple({self.token_ids(text)[-1] for text in ENDS})
        self.queues = RolloutQueues()
        self.engines: list[Any] = create_vllm_engines(
            2,
            pretrain=str(folder),
            enforce_eager=True,
            max_model_len=96,
            max_restarts=1,
            prompt_queue=self.queues.prompts,
            results_queue=self.queues.results,
            engine_args={
                "load_format": "dummy", "dtype": "float32", "max_num_seqs": 16, "skip_tokenizer_init": True,
                "kv_cache_memory_bytes": 1 << 28, "worker_extension_cls": "instep.dropin.open_instruct.WorkerWrap",
            },
            tokenizer=Tokens(),
            tools=[Add()],
            tool_parser=OnceParser,
            reward_config=RewardConfig(verifiers={"length": length}, verification_reward=1.0),
            timeout=400.0,
        )  # fmt: skip

    def token_ids(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def ask(self, round: int, name: int, **options: Any) -> PromptRequest:
        sampling = {"max_tokens": LENGTH, "stop_token_ids": self.ends, **options.pop("sampling", {})}
        id = PromptId("train", round, str(name))
        prompt = self.token_ids(f"Question {name}: what is the number after {name}? Think, then")
        return PromptRequest(id=id, prompt_token_ids=prompt, sampling=Sampling(**sampling), labels=(Label("length", 1),), **options)

    def generate(self, index: int, round: int, **options: Any) -> GenerationResult:
        result: GenerationResult = ray.get(self.engines[index].generate.remote(self.ask(round, 0, **options)), timeout=SOON)
        return result


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment(SETTINGS), logging_level="ERROR", log_to_driver=False)
    yield Fleet(smollm2())
    ray.shutdown()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The engines need the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(seed: int) -> Any:
    """In float32, as the engines: what bfloat16 rounds would hide small differences."""
    model = load(smollm2())
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.add_(torch.randn(param.shape, generator=noise), alpha=NOISE * float(param.std()))
    return model


def gaps(models: dict[str, Any], prompt: list[int], sample: Sample) -> tuple[list[float], list[float]]:
    """How far each token's log-probability is from what the model of its version says, and from the nearest of the other models."""
    said = {version: trainer_logprobs(model, prompt, sample.token_ids, 1.0) for version, model in models.items()}
    version_of = {index: span.version for span in sample.versions for index in range(span.start, span.end)}
    own = [abs(sample.logprobs[i] - said[version][i]) for i, version in version_of.items()]
    elsewhere = [[abs(sample.logprobs[i] - said[other][i]) for other in models if other != version] for i, version in version_of.items()]
    others = [min(found) for found in elsewhere if found]
    return own, others


@pytest.mark.exhaustive  # tests/originals has it against the page's own calls
def test_open_instructs_trainer_brings_weights_to_the_actors(fleet: Fleet) -> None:
    from instep.dropin.open_instruct import broadcast_weights_to_vllm, init_process_group

    port = free_port()
    joining = [
        engine.init_process_group.remote("127.0.0.1", port, 1 + index, 3, "openrlhf", "gloo", timeout_minutes=1)
        for index, engine in enumerate(fleet.engines)
    ]
    group = init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=timedelta(minutes=1), world_size=3, rank=0, group_name="openrlhf")
    assert [[status["ok"] for status in statuses] for statuses in ray.get(joining, timeout=SOON)] == [[True], [True]]
    for round, seed in enumerate((5, 6)):
        model = trained(seed)
        assert broadcast_weights_to_vllm(model, fleet.engines, group, 0) == []
        for index in range(2):
            sample = fleet.generate(index, round).samples[0]
            assert len({span.version for span in sample.versions}) == 1
            assert ray.get(fleet.engines[index].status.remote(), timeout=SOON).version == sample.versions[0].version
            own, others = gaps({sample.versions[0].version: model, "another": trained(7)}, fleet.ask(round, 0).prompt_token_ids, sample)
            assert max(own) < CLOSE
            assert sum(others) / len(others) > APART
    group.close()


@pytest.mark.parametrize(("prompts", "pushes"), [(24, 3), pytest.param(64, 7, marks=pytest.mark.exhaustive)])
def test_each_prompt_is_answered_once_with_tools_on_while_weights_are_pushed(fleet: Fleet, prompts: int, pushes: int) -> None:
    """The engines hold 16 samples each, of 4 for a prompt: pushes meet samples that are under way."""
    name = f"of-{prompts}"
    models = {f"{name}-0": trained(10)}
    policy = trained(10)
    with WeightSync(policy, fleet.engines) as sync:
        sync.push(f"{name}-0")
        requests = [fleet.ask(prompts, number, sampling={"n": 4, "seed": number}) for number in range(prompts)]
        for request in requests:
            fleet.queues.prompts.put(request)
        found: list[GenerationResult] = []
        for step in range(1, 1 + pushes):
            found += collect(fleet.queues.results, prompts // (1 + pushes), sync, SOON)
            models[f"{name}-{step}"] = trained(10 + step)
            policy.load_state_dict(models[f"{name}-{step}"].state_dict())
            sync.push(f"{name}-{step}")
        found += collect(fleet.queues.results, prompts - len(found), sync, SOON)
    once(found, [request.id for request in requests], 4)
    samples = [sample for result in found for sample in result.samples]
    assert {record.outcome for sample in samples for record in sample.tools} <= {"ok", "excess"}
    assert max(sample.turns for sample in samples) > 1
    mixed = 0
    for sample in samples:
        covered = [index for span in sample.versions for index in range(span.start, span.end)]
        assert covered == [index for index, own in enumerate(sample.mask) if own]  # spans partition the model's tokens
        assert versions(sample) == sorted(versions(sample))
        mixed += len(set(versions(sample))) > 1
    assert mixed > 0
    torch.set_num_threads(2)  # the engines have nothing to do any more
    apart = []
    for number, result in enumerate(found):  # a forward of the trainer's for one sample of each prompt
        sample = result.samples[number % 4]
        wrong = {(versions(sample)[-1] + 1) % (1 + pushes)} if number % 4 == 0 else set()
        steps = {f"{name}-{step}": models[f"{name}-{step}"] for step in {*versions(sample), *wrong}}
        own, others = gaps(steps, result.request.prompt_token_ids, sample)
        assert max(own) < CLOSE
        apart += others if wrong else []
    assert sum(apart) / len(apart) > APART


def versions(sample: Sample) -> list[int]:
    return [int(span.version.rpartition("-")[2]) for span in sample.versions]


def test_an_actor_that_is_killed_loses_nothing_and_comes_back_with_the_current_weights(fleet: Fleet) -> None:
    """Last: its first engine is another one afterwards."""
    model = trained(30)
    with WeightSync(model, fleet.engines) as sync:
        sync.push("w1")
        requests = [fleet.ask(20, name, sampling={"n": 2, "ignore_eos": True}) for name in range(40)]
        for request in requests:
            fleet.queues.prompts.put(request)
        found = collect(fleet.queues.results, 4, sync, SOON)
        assert ray.get(fleet.engines[0].status.remote(), timeout=SOON).prompts > 0
        restart(fleet.engines[0])
        found += collect(fleet.queues.results, 36, sync, SOON)
        once(found, [request.id for request in requests], 2)
        assert fleet.queues.sizes().reissued > 0
        assert {span.version for result in found for sample in result.samples for span in sample.versions} == {"w1"}
        until(lambda: ready(fleet.engines[0]), SOON)
        sync.catch_up()
        sample = fleet.generate(0, 21).samples[0]
        own, others = gaps({"w1": model, "another": trained(10)}, fleet.ask(21, 0).prompt_token_ids, sample)
        assert max(own) < CLOSE
        assert sum(others) / len(others) > APART
