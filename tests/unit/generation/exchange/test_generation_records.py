"""Requests, sampling settings, and what a trainer and a log get out of results."""

from __future__ import annotations

import math
import pickle
from typing import Any

import msgspec
import pytest
import torch
from helpers.rollouts import encode, request
from helpers.sample_records import sample

from instep.errors import ConfigError
from instep.generation import GenerationResult, Label, PromptId, PromptRequest, RequestId, Sampling, VersionSpan
from instep.generation.batch import collate
from instep.generation.sampling import from_vllm
from instep.generation.statistics import lag, metrics, token_statistics
from instep.generation.types import Reward, RewardPart, ToolRecord


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt train/0/p has no tokens"):
        request("")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n": 0}, "n must be"), ({"max_tokens": 0}, "max_tokens"), ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"temperature": -1.0}, "temperature"), ({"temperature": math.nan}, "temperature"), ({"stop": "END"}, "tuple of strings"),
        ({"extra": {"top_k": 1}}, "extra holds top_k"), ({"extra": {"logprobs": 5}}, "extra holds logprobs"),
        ({"extra": {"prompt_logprobs": 1}}, "extra holds prompt_logprobs"),
    ],
)  # fmt: skip
def test_sampling_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sampling(**settings)


def test_every_setting_reaches_the_engine() -> None:
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("END",), stop_token_ids=(7,), ignore_eos=True, extra={"bad_words": ["x"]}
    )
    assert sampling.of_turn(0, 0, max_tokens=9, generated=0, stop=()).vllm_kwargs() == {
        "n": 1, "max_tokens": 9, "min_tokens": 0, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": None,
        "stop": ["END"], "stop_token_ids": [7], "ignore_eos": True, "bad_words": ["x"],
        "logprobs": 0, "detokenize": True, "skip_special_tokens": False,
    }  # fmt: skip


def test_text_is_made_only_where_stop_strings_are_looked_for() -> None:
    assert Sampling().vllm_kwargs()["detokenize"] is False


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ()), ({"temperature": 0.6}, ()), ({"top_k": -1}, ()), ({"top_p": 0.9, "top_k": 5}, ("top_p", "top_k")),
        ({"temperature": 0.0}, ("temperature",)), ({"min_tokens": 2}, ("min_tokens",)),
        ({"extra": {"repetition_penalty": 1.1}}, ("repetition_penalty",)),
    ],
)  # fmt: skip
def test_settings_that_a_trainers_softmax_does_not_have_are_named(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    assert Sampling(**settings).shaped_by == names


class Params(msgspec.Struct):
    """The shape of `vllm.SamplingParams`; `tests/integration/test_generation_parsers_vllm.py` has the real one."""

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    guide: Any = None
    _private: int = 0


def test_settings_of_vllm_are_taken_over_and_those_that_we_do_not_know_are_passed_on_as_they_are() -> None:
    guide = object()
    sampling = from_vllm(
        Params(n=2, max_tokens=99, stop=["a"], stop_token_ids=[3], logprobs=1, presence_penalty=0.5, guide=guide, _private=4)
    )
    assert sampling == Sampling(n=2, max_tokens=99, stop=("a",), stop_token_ids=(3,), extra={"presence_penalty": 0.5, "guide": guide})


@pytest.mark.parametrize(("params", "words"), [(Params(prompt_logprobs=1), "prompt_logprobs"), (Params(max_tokens=None), "max_tokens")])
def test_settings_of_vllm_that_no_sample_can_answer_are_refused(params: Params, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_vllm(params)


def result(*samples: Any, **fields: Any) -> GenerationResult:
    return GenerationResult(request=request(**fields), samples=list(samples))


def mixed() -> GenerationResult:
    """Two samples of the prompt "hi": one with a tool and two versions, one short."""
    spans = [VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 2), VersionSpan("v2", 4, 5)]
    long = sample(
        encode("abxxc"), mask=[1, 1, 0, 0, 1], logprobs=[-1.0, -2.0, 0.0, 0.0, -3.0], versions=spans, reward=Reward(1.5), turns=2,
        tools=[ToolRecord(tool="t", turn=0, outcome="ok", seconds=0.5), ToolRecord(tool="t", turn=0, outcome="excess")],
    )  # fmt: skip
    return result(long, sample(encode("d"), 1, finish_reason="length", seconds=1.0))


def test_a_batch_lines_everything_up_with_its_token() -> None:
    batch = collate([mixed()], pad_token_id=9)
    h, i, a, b, x, c, d = encode("hiabxcd")
    assert batch.token_ids.tolist() == [[h, i, a, b, x, x, c], [h, i, d, 9, 9, 9, 9]]
    assert batch.attention_mask.int().tolist() == [[1] * 7, [1, 1, 1, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [list(range(7)), [0, 1, 2, 2, 2, 2, 2]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0]]
    assert batch.logprobs.tolist() == [[0, 0, -1.0, -2.0, 0, 0, -3.0], [0, 0, -0.5, 0, 0, 0, 0]]
    assert batch.version_ids.tolist() == [[-1, -1, 0, 1, -1, -1, 1], [-1, -1, 0, -1, -1, -1, -1]]
    assert (batch.versions, [id.sample for id in batch.ids]) == (["v1", "v2"], [0, 1])
    assert batch.rewards[0] == 1.5
    assert batch.rewards[1].isnan()


def test_masks_are_true_and_false_so_that_their_sum_is_a_number_of_tokens() -> None:
    batch = collate([mixed()], 0)
    assert (batch.attention_mask.dtype, batch.response_mask.dtype) == (torch.bool, torch.bool)
    assert (int(batch.attention_mask.sum()), int(batch.response_mask.sum())) == (10, 4)


def test_a_trainer_may_train_on_tool_output_and_the_record_still_says_what_it_was() -> None:
    batch = collate([mixed()], 0, train_on_tool_output=True)
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0]]
    assert batch.logprobs[0, 4:6].tolist() == [0.0, 0.0]


def test_an_empty_response_is_a_row_with_nothing_to_train_on() -> None:
    batch = collate([result(sample([]), sample(encode("d"), 1))], 0)
    assert batch.response_mask.sum(1).tolist() == [0, 1]


def test_a_broken_verifiers_score_does_not_reach_the_trainer() -> None:
    assert collate([result(sample(encode("a"), reward=Reward(-7.0, [], "broken")))], 0).rewards.isnan().all()


def test_no_samples_make_no_batch() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        collate([], 0)


def test_statistics_count_the_models_tokens_and_the_tools() -> None:
    statistics = token_statistics(mixed())
    assert (statistics.prompt_tokens, statistics.response_tokens, statistics.tool_tokens, statistics.seconds) == (2, 6, 2, 2.0)
    assert statistics.tokens_per_second == 2.0


def test_metrics_tell_lengths_ends_tools_and_rewards_and_lose_none() -> None:
    right = sample(encode("a"), reward=Reward(2.0, [RewardPart("maths", 1.0)]))
    broken = sample(encode("a"), reward=Reward(9.0, [RewardPart("maths", 0.0, 1.0, "x")], "x"))
    scored = result(right, broken)
    numbers = metrics([mixed(), scored])
    assert numbers["tokens/response"] == (5 + 1 + 1 + 1) / 4
    assert (numbers["finish/stop"], numbers["finish/length"]) == (0.75, 0.25)
    assert (numbers["tools/t/calls"], numbers["tools/t/excess"], numbers["tools/t/failed"], numbers["tools/t/seconds"]) == (
        0.5,
        0.25,
        0.0,
        0.5,
    )
    assert (numbers["reward/score"], numbers["reward/broken"], numbers["reward/maths"]) == ((1.5 + 2.0) / 2, 1 / 3, 1.0)
    assert metrics([]) == {}


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    (long, short) = mixed().samples
    assert lag(long, ["v1", "v2", "v3"]) == 2
    assert lag(short, ["v1"]) == 0
    assert lag(long, ["v2", "v3"]) == 2  # v1 is older than all that are known
    assert lag(sample([]), ["v1"]) == 0


def test_what_a_prompt_is_worth_and_where_it_comes_from_travel_with_it() -> None:
    asked = request(labels=(Label("maths", "4"),), index=17, metadata={"source": "gsm8k"})
    back = pickle.loads(pickle.dumps(GenerationResult(request=asked, samples=[sample(encode("4"))])))
    assert (back.request, back.request.index, back.request.labels[0].value) == (asked, 17, "4")


def test_records_are_written_as_json_and_read_back() -> None:
    whole = mixed()
    assert msgspec.json.decode(msgspec.json.encode(whole), type=GenerationResult) == whole


def test_ids_are_values_and_sort_by_round_and_sample() -> None:
    ids = [RequestId(PromptId("train", round, "p"), sample) for round in (1, 0) for sample in (1, 0)]
    assert [str(id) for id in sorted(ids)] == ["train/0/p/0", "train/0/p/1", "train/1/p/0", "train/1/p/1"]
    assert len({*ids, *ids}) == 4


def test_a_request_is_made_with_plain_arguments() -> None:
    assert PromptRequest(id=PromptId("eval", 3, "q"), prompt_token_ids=[1]).sampling == Sampling()
