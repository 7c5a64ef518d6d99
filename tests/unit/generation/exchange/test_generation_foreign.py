"""Open Instruct's prompts, managers, datasets and rewards, given to an actor as they are."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers.rollouts import Say, decode, encode
from helpers.serving import SOON, FakeServing, Fleet, wait

from instep.errors import ConfigError
from instep.generation import ExactMatch, RewardConfig, TaggedParser
from instep.generation.exchange import records as records
from instep.generation.exchange.foreign import read
from instep.generation.exchange.ledger import Ledger
from instep.generation.ray.arguments import actor_options
from instep.generation.rewards.dataset import DatasetRewards


@dataclass
class PromptRequest:
    """As Open Instruct's, with its result beside it."""

    prompt: list[int]
    generation_config: Any
    index: int
    prompt_id: str
    is_eval: bool = False
    active_tools: list[str] | None = None


@dataclass
class GenerationResult:
    responses: list[list[int]]
    finish_reasons: list[str]
    masks: list[list[int]]
    request_info: Any
    index: int | None
    prompt_id: str | None
    token_statistics: Any = None
    start_time: float | None = None
    logprobs: list[list[float]] | None = None
    reward_scores: list[float] | None = None
    reward_metrics: dict[str, Any] | None = None


@dataclass
class Config:
    temperature: float = 0.5
    max_tokens: int = 20
    n: int = 2
    stop: list[str] | None = None
    seed: int | None = 3
    logprobs: int = 1
    extra: Any = field(default=None)


class Manager:
    """As Open Instruct's, which is told nothing of actors."""

    def __init__(self) -> None:
        self.stop = False

    def should_stop(self) -> bool:
        return self.stop


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.stop()


def ask(name: str = "0_7", config: Any = Config, **fields: Any) -> PromptRequest:
    return PromptRequest(encode("say"), config() if config else None, 7, name, **fields)


def test_a_prompt_of_open_instructs_comes_back_as_its_result(fleet: Fleet) -> None:
    serving = FakeServing("hi<|end|>")
    fleet.actor(serving, actor_manager=Manager())
    fleet.prompts.put(ask())
    fleet.prompts.put(ask("eval", is_eval=True))
    result: Any = pickle.loads(pickle.dumps(fleet.results.get(timeout=SOON)))
    assert type(result) is GenerationResult
    assert result.responses == [encode("hi<|end|>")] * 2
    assert (result.finish_reasons, result.masks, result.logprobs) == (["stop"] * 2, [[1] * 3] * 2, [[-0.5] * 3] * 2)
    assert (result.index, result.prompt_id, result.reward_scores) == (7, "0_7", None)
    assert (result.token_statistics.num_prompt_tokens, result.token_statistics.num_response_tokens) == (3, 6)
    assert (result.request_info.num_calls, result.request_info.tool_calleds) == ([0, 0], [False, False])
    ours: Any = result
    assert ours.versions == [[("default", 0, 3)]] * 2
    assert ours.error is None
    asked = [sampling for id, _, sampling, _ in serving.asked if id.startswith("train")]
    assert [(one["temperature"], one["seed"], one["max_tokens"]) for one in asked] == [(0.5, 3, 20), (0.5, 4, 20)]
    assert fleet.evals.get(timeout=SOON).prompt_id == "eval"


def test_vllm_s_parameters_and_the_defaults_of_open_instruct_are_understood() -> None:
    assert read(ask(config=None)).sampling.temperature == 0.7
    assert read(ask(config=None)).sampling.max_tokens == 256
    with pytest.raises(ConfigError, match="asks for extra"):
        read(ask(config=lambda: Config(extra=1)))
    for wrong, why in ((lambda: "hot", "is a str"), (lambda: Config(n=0), "n must be at least 1")):
        with pytest.raises(ConfigError, match=why):
            read(ask(config=wrong))


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (ask(active_tools=["saw"]), "no tool saw"),
        (ask(config=lambda: "hot"), "generation_config is a str"),
        (PromptRequest([], Config(), 7, "empty"), "has no tokens"),
        (PromptRequest(5, Config(), 7, "five"), "list of token ids"),  # type: ignore[arg-type]
        ({"prompt": [1]}, "a dict is no prompt"),
        ("hello", "a str is no prompt"),
        (object(), "a object is no prompt"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_understood_is_answered_with_an_error_and_nothing_dies(fleet: Fleet, item: Any, why: str) -> None:
    actor = fleet.actor(FakeServing("hi"))
    fleet.prompts.put(item)
    refused = fleet.results.get(timeout=SOON)
    assert set(refused.finish_reasons) == {"error"}
    assert why in refused.error
    assert refused.responses == refused.masks == refused.logprobs == [[]] * len(refused.finish_reasons)
    assert refused.prompt_id == getattr(item, "prompt_id", None)
    fleet.prompts.put(ask("after"))
    assert fleet.results.get(timeout=SOON).prompt_id == "after"
    actor.check_background_threads()


def test_a_second_prompt_of_one_name_is_refused_and_the_first_is_answered(fleet: Fleet) -> None:
    serving = FakeServing("hi", hold=1)
    actor = fleet.actor(serving)
    fleet.prompts.put(ask())
    fleet.prompts.put(ask())
    assert "under way already" in fleet.results.get(timeout=SOON).error
    serving.release()
    assert fleet.results.get(timeout=SOON).error is None
    actor.check_background_threads()


def test_marks_of_an_end_are_no_prompts(fleet: Fleet) -> None:
    fleet.actor(FakeServing("hi"))
    for item in (None, records.ShutdownSentinel(), ask()):
        fleet.prompts.put(item)
    assert fleet.results.get(timeout=SOON).prompt_id == "0_7"
    assert fleet.results.empty()


def test_a_manager_that_only_knows_should_stop_pauses_an_actor(fleet: Fleet) -> None:
    manager = Manager()
    manager.stop = True
    actor = fleet.actor(FakeServing("hi"), actor_manager=manager)
    fleet.prompts.put(ask())
    wait(lambda: actor._work.paused)
    assert fleet.results.empty()
    manager.stop = False
    assert fleet.results.get(timeout=SOON).prompt_id == "0_7"


def test_prompts_without_an_answer_come_back_as_they_were_put(fleet: Fleet) -> None:
    serving = FakeServing("hi", hold=1)
    actor, prompt = fleet.actor(serving), ask()
    fleet.prompts.put(prompt)
    wait(lambda: serving.running)
    assert actor.stop(drain=False) == [prompt]


def test_a_call_is_answered_in_the_form_of_its_prompt(fleet: Fleet) -> None:
    assert type(fleet.actor(FakeServing("hi")).submit(ask()).result(SOON)) is GenerationResult


def test_tools_are_counted_and_their_tokens_masked_as_asked(fleet: Fleet) -> None:
    def says(token_ids: list[int]) -> str:
        return "done<|end|>" if "said x" in decode(token_ids) else "<say>x</say>"

    options = {"tools": [Say()], "tool_parser": TaggedParser, "max_tool_calls": 1}
    for mask in (True, False):
        actor = fleet.actor(FakeServing(says), mask_tool_use=mask, prompt_queue=None, **options)
        result = actor.submit(ask(str(mask), config=lambda: Config(n=1, max_tokens=500))).result(SOON)
        assert (0 in result.masks[0]) is mask
        assert (result.request_info.num_calls, result.request_info.tool_outputs) == ([1], ["said x"])
        assert result.request_info.tool_call_stats[0][0].success
    always = fleet.actor(FakeServing("<say>x</say>"), prompt_queue=None, **options)
    info = always.submit(ask(config=lambda: Config(n=1, max_tokens=900))).result(SOON).request_info
    assert info.excess_tool_calls[0]["say"] > 0


ROWS = [{"index": 5, "ground_truth": "no", "dataset": "match"}, {"index": 7, "ground_truth": ["hi", "ho"], "dataset": ["match", "match"]}]


def test_rows_of_the_dataset_say_what_answers_are_verified_against(fleet: Fleet) -> None:
    rewards = DatasetRewards(RewardConfig(verifiers={"match": ExactMatch()}), ROWS)
    fleet.actor(FakeServing("hi<|end|>"), reward_config=rewards)
    fleet.prompts.put(ask())
    assert fleet.results.get(timeout=SOON).reward_scores == [10.0, 10.0]
    fleet.prompts.put(PromptRequest([1], Config(), 99, "nowhere"))
    assert "no row with index 99" in fleet.results.get(timeout=SOON).error


def test_open_instructs_reward_function_is_called_with_what_it_takes(fleet: Fleet) -> None:
    seen: list[Any] = []

    class Rewards:
        def build(self) -> Any:
            async def score(*arguments: Any) -> Any:
                seen.append(arguments)
                if len(seen) == 2:
                    raise ValueError("no verdict")
                return [0.5, 1.5], {"objective/match": 1.0}

            return score

    fleet.actor(FakeServing("hi<|end|>"), reward_config=DatasetRewards(Rewards(), ROWS))
    fleet.prompts.put(ask())
    result = fleet.results.get(timeout=SOON)
    assert (result.reward_scores, result.reward_metrics) == ([0.5, 1.5], {"objective/match": 1.0})
    tokens, texts, truths, sources, ends, info, queries = seen[0]
    assert (tokens, texts, ends, queries) == (result.responses, ["hi", "hi"], ["stop", "stop"], ["say", "say"])
    assert (truths, sources) == ([["hi", "ho"]] * 2, [["match", "match"]] * 2)
    assert info.num_calls == [0, 0]
    fleet.prompts.put(ask())
    assert fleet.results.get(timeout=SOON).reward_scores == [0.0, 0.0]
    fleet.prompts.put(ask("eval", is_eval=True))
    assert "there is no eval_dataset" in fleet.evals.get(timeout=SOON).error


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"tool_parser_type": "pigeon"}, "tool_parser_type 'pigeon' is none of"),
        ({"tool_actors": [object()]}, "has no safe_execute"),
        ({"max_tool_calls": [5]}, "max_tool_calls is a number"),
        ({"max_tool_calls": -1}, "must not be negative"),
        ({"reward_config": object()}, "has no build"),
        ({"train_dataset": ROWS}, "no reward_config"),
        ({"reward_config": RewardConfig(), "train_dataset": [{"index": 1}]}, "no column ground_truth, dataset"),
        ({"prompt_queue": Fleet().prompts}, "no results_queue"),
        ({"prompt_queue": 5, "results_queue": Fleet().results}, "prompt_queue is a int"),
        ({"actor_manager": object()}, "which has no should_stop"),
        ({"use_fp8": True}, "no argument use_fp8"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_an_argument_that_cannot_be_honoured_is_refused_by_its_name(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        actor_options(**arguments)


def test_a_ledger_takes_results_in_open_instructs_form(fleet: Fleet) -> None:
    from helpers.rollouts import run

    async def story() -> Any:
        ledger = Ledger()
        await ledger.put(read(ask()))
        assert await ledger.take("actor") is not None
        await ledger.hand_over(fleet.actor(FakeServing("hi")).submit(ask()).result(SOON))
        return await ledger.get("train")

    assert run(story()).prompt_id == "0_7"


def test_a_result_class_that_wants_what_is_not_known_here_is_replaced(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Later(GenerationResult):
        model_step: int = field(kw_only=True)

    monkeypatch.setattr(f"{__name__}.GenerationResult", Later)
    fleet.actor(FakeServing("hi"))
    fleet.prompts.put(ask())
    assert type(fleet.results.get(timeout=SOON)) is records.GenerationResult
