"""An actor on a real vLLM: prompts by a queue, tools, rewards, pushes while it generates, its HTTP server, and the end of its engine."""

from __future__ import annotations

import json
import math
import queue
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines import ARGUMENTS, settings
from models import PROMPTS, tiny
from plain_tokens import Add, OnceParser, Tokens, length, trainer_logprobs

from instep import WeightSync
from instep.engine.vllm.serving import start_vllm
from instep.errors import ConfigError, EngineLost, GenerationError, SyncError
from instep.generation import Label, PromptId, PromptRequest, RewardConfig, Sampling
from instep.generation.actor.actor import LLMActor
from instep.generation.types import GenerationResult

SOON = 120.0
LENGTH, LONG = 60, 90


class Run:
    """The actor, its queues and the model that it follows."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.prompts: queue.Queue[Any] = queue.Queue()
        self.results: queue.Queue[Any] = queue.Queue()
        arguments = {**ARGUMENTS, "load_format": "dummy", "enable_prefix_caching": True, "max_num_batched_tokens": 96}
        with settings():
            self.actor = LLMActor(
                partial(start_vllm, str(folder), **arguments), tokenizer=Tokens(), prompt_queue=self.prompts, results_queue=self.results,
                reward_config=RewardConfig(verifiers={"length": length}, verification_reward=1.0), tools=[Add()], tool_parser=OnceParser,
                **options,
            )  # fmt: skip
        self.model = tiny("qwen3", 2)
        self.sync = WeightSync(self.model, [self.actor])
        self.count = 0

    def push(self) -> str:
        self.count += 1
        self.sync.push(f"v{self.count}")
        return f"v{self.count}"

    def ask(self, prompt: list[int], **sampling: Any) -> PromptRequest:
        self.count += 1
        options = {name: sampling.pop(name) for name in ("labels", "tools") if name in sampling}
        sampling = {"max_tokens": LENGTH, "ignore_eos": True, **sampling}
        id = PromptId("train", 0, str(self.count))
        return PromptRequest(id=id, prompt_token_ids=prompt, sampling=Sampling(**sampling), **{"tools": (), **options})

    def tokens_in_flight(self, least: int, requests: int = 1) -> None:
        """Returns when the engine has at least so many requests, and each of them so many tokens."""
        states = self.actor._serving.llm.output_processor.request_states  # type: ignore[union-attr]
        deadline = time.monotonic() + SOON
        while len(states) < requests or min(state.detokenizer.num_output_tokens() for state in list(states.values())) < least:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture(scope="module")
def run(checkpoints: Callable[[str, int], Path]) -> Iterator[Run]:
    run = Run(checkpoints("qwen3", 1), http=True)
    yield run
    run.sync.close()
    run.actor.stop(drain=False)


def test_prompts_come_back_scored_with_the_log_probabilities_that_the_trainer_computes(run: Run) -> None:
    version = run.push()
    requests = [run.ask(PROMPTS[i % 3], n=3, seed=i, temperature=0.5, max_tokens=12, labels=(Label("length", 1),)) for i in range(6)]
    for request in requests:
        run.prompts.put(request)
    results = {result.request.id: result for result in (run.results.get(timeout=SOON) for _ in requests)}
    assert set(results) == {request.id for request in requests}
    for request in requests:
        for sample in results[request.id].samples:
            assert [(span.version, span.start, span.end) for span in sample.versions] == [(version, 0, 12)]
            assert sample.reward is not None
            assert sample.reward.score == 12.0
            expected = trainer_logprobs(run.model, request.prompt_token_ids, sample.token_ids, 0.5)
            assert max(abs(a - b) for a, b in zip(sample.logprobs, expected, strict=True)) < 0.25  # bfloat16, temperature 0.5
        assert len({tuple(sample.token_ids) for sample in results[request.id].samples}) == 3
    again = run.actor.submit(run.ask(PROMPTS[1], n=3, seed=1, temperature=0.5, max_tokens=12)).result(SOON)
    assert [sample.token_ids for sample in again.samples] == [sample.token_ids for sample in results[requests[1].id].samples]


def test_seeds_survive_a_push_after_which_a_batch_takes_only_some_of_the_requests(run: Run) -> None:
    run.push()
    requests = [run.ask([i + 1] * 30, n=4, seed=i) for i in range(4)]
    for request in requests:
        run.prompts.put(request)
    run.tokens_in_flight(5)
    run.push()
    results = {result.request.id: result for result in (run.results.get(timeout=SOON) for _ in requests)}
    assert {len(sample.token_ids) for result in results.values() for sample in result.samples} == {LENGTH}
    assert any(len(sample.versions) == 2 for result in results.values() for sample in result.samples)
    run.actor.check_background_threads()


def test_tools_run_between_turns_and_a_broken_verifier_costs_one_sample(run: Run) -> None:
    request = run.ask(
        PROMPTS[0], max_tokens=20, tools=None, labels=(Label("length", 1),), stop_token_ids=tuple(range(50, 150)), ignore_eos=False
    )
    result = run.actor.submit(request).result(SOON)
    sample = result.samples[0]
    assert sample.turns >= 2
    assert {record.outcome for record in sample.tools} <= {"ok", "excess"}
    first = sample.mask.index(0)
    assert sample.token_ids[first : first + 3] == [7, 8, 9]
    broken = run.actor.submit(run.ask(PROMPTS[0], max_tokens=5, labels=(Label("length", "break"),))).result(SOON).samples[0]
    assert "no verdict" in str(broken.reward and broken.reward.error)
    run.actor.check_background_threads()


def test_a_push_in_flight_loses_no_sample_and_labels_both_versions(run: Run) -> None:
    before = run.push()
    run.model.load_state_dict(tiny("qwen3", 3).state_dict())
    for index in range(4):
        run.prompts.put(run.ask([index + 1, 2, 3], n=2, max_tokens=LONG))
    run.tokens_in_flight(5, requests=8)
    after = run.push()
    results: list[GenerationResult] = [run.results.get(timeout=SOON) for _ in range(4)]
    samples = [sample for result in results for sample in result.samples]
    assert len(samples) == 8
    for sample in samples:
        assert [span.version for span in sample.versions] in ([before, after], [before])  # a fast engine may end one before the commit
        assert [span.start for span in sample.versions] == [0, *(span.end for span in sample.versions[:-1])]
        assert (sample.versions[-1].end, len(sample.token_ids)) == (LONG, LONG)
        assert all(math.isfinite(logprob) for logprob in sample.logprobs)
    assert any(len(sample.versions) == 2 for sample in samples)
    assert run.actor.status().version == after


def test_a_drained_push_never_mixes_versions_in_a_turn(run: Run) -> None:
    before = run.push()
    run.actor.inflight_updates = False
    try:
        futures = [run.actor.submit(run.ask([index + 1, 2, 3])) for index in range(3)]
        run.tokens_in_flight(2, requests=3)
        after = run.push()
        late = run.actor.submit(run.ask(PROMPTS[0], max_tokens=5)).result(SOON)
    finally:
        run.actor.inflight_updates = True
    assert [[span.version for span in future.result(SOON).samples[0].versions] for future in futures] == [[before]] * 3
    assert [span.version for span in late.samples[0].versions] == [after]


def test_cancelling_ends_samples_with_what_they_have_and_leaves_nothing_running(run: Run) -> None:
    kept, dropped = run.ask([4, 5, 6], n=2), run.ask([7, 8, 9])
    future, call = run.actor.submit(kept), run.actor.submit(dropped)
    run.tokens_in_flight(3, requests=3)
    assert call.cancel()
    assert run.actor.cancel(kept.id)
    samples = future.result(SOON).samples
    assert {sample.finish_reason for sample in samples} == {"abort"}
    assert all(3 <= len(sample.token_ids) < LENGTH for sample in samples)
    assert all(sample.versions[-1].end == len(sample.token_ids) for sample in samples)
    deadline = time.monotonic() + SOON
    while run.actor.status().prompts or run.actor._serving.llm.output_processor.request_states:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_actor_says_what_it_is(run: Run) -> None:
    info, dims = run.actor.kv_cache_info(), run.actor.get_model_dims()
    assert info.max_model_len == ARGUMENTS["max_model_len"]
    assert info.tokens > 1000
    assert info.samples == 2 * ARGUMENTS["max_num_seqs"]
    assert (dims.num_layers, dims.hidden_size, dims.num_kv_heads, dims.head_dim, dims.vocab_size) == (2, 64, 2, 32, 150)
    assert run.actor.reset_prefix_cache()
    with pytest.raises(ConfigError, match="logprobs_mode"), settings():
        LLMActor(partial(start_vllm, "nowhere", logprobs_mode="raw_logprobs"), tokenizer=Tokens())


def test_openai_requests_are_answered_by_the_same_engine(run: Run) -> None:
    """Last but one, as it uses what vLLM has of the engine's tokenizer: none."""
    assert run.actor.url is not None
    assert run.actor.url.startswith("http://127.0.0.1:")
    version = run.push()
    with urllib.request.urlopen(run.actor.url + "/models", timeout=SOON) as answer:
        model = json.loads(answer.read())["data"][0]["id"]
    body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0.0, "return_token_ids": True}
    address = run.actor.url + "/completions"
    call = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=SOON) as answer:
        token_ids = json.loads(answer.read())["choices"][0]["token_ids"]
    direct = run.actor.submit(run.ask(PROMPTS[0], max_tokens=5, temperature=0.0)).result(SOON).samples[0]
    assert token_ids == direct.token_ids
    assert direct.versions[0].version == version


def test_an_engine_that_is_killed_ends_the_actor_with_an_error_in_time(run: Run) -> None:
    """Last: nothing is left of the engine."""
    future = run.actor.submit(run.ask([1, 2, 3]))
    run.tokens_in_flight(2)
    for process in run.actor._serving.llm.engine_core.resources.engine_manager.processes:  # type: ignore[union-attr]
        process.kill()
    with pytest.raises((EngineLost, GenerationError)):
        future.result(SOON)
    with pytest.raises(GenerationError, match="EngineLost"):
        run.actor.check_background_threads()
    with pytest.raises(SyncError):
        run.push()
