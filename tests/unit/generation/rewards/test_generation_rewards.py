"""Rewards: what verifiers say, how it adds up, and what happens when one breaks."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from helpers.rollouts import TOKENIZER, encode, request, run
from helpers.sample_records import sample

from instep.errors import ConfigError
from instep.generation import GenerationResult, Label, RewardConfig
from instep.generation.types import Reward, ToolRecord
from instep.generation.verifiers import Answer

LABELS = (Label("right", "yes"),)


async def right(answer: Answer, value: Any) -> float:
    return float(answer.text == value)


def reward(text: str = "yes", labels: tuple[Label, ...] = LABELS, fields: dict[str, Any] | None = None, **settings: Any) -> Reward:
    config = RewardConfig(verifiers={"right": right, **settings.pop("verifiers", {})}, **settings)
    result = GenerationResult(request=request(labels=labels), samples=[sample(encode(text), **(fields or {}))])
    (scored,) = run(config.build(TOKENIZER)(result)).samples
    assert scored.reward is not None
    return scored.reward


def test_a_right_answer_has_the_verification_reward_and_a_wrong_one_nothing() -> None:
    assert reward().score == 10.0
    assert reward("no").score == 0.0
    assert reward(verification_reward=2.0).score == 2.0


def test_several_verifiers_add_up_by_their_weights() -> None:
    async def half(answer: Answer, value: Any) -> float:
        return 0.5

    whole = reward(labels=(*LABELS, Label("half", None, 2.0), Label("right", "no", 7.0)), verifiers={"half": half})
    assert whole.score == 10.0 * (1.0 + 0.5 * 2.0 + 0.0)
    assert [(part.name, part.value, part.weight) for part in whole.parts] == [("right", 1.0, 1.0), ("half", 0.5, 2.0), ("right", 0.0, 7.0)]


FORMATTED = "<think>hm</think><answer>yes</answer>"


async def contains(answer: Answer, value: Any) -> float:
    return float(value in answer.text)


@pytest.mark.parametrize(
    ("text", "settings", "score"),
    [
        (FORMATTED, {"format_reward": 1.0}, 11.0),
        ("yes", {"format_reward": 1.0}, 10.0),
        ("<think>hm</think><answer>no</answer>", {"format_reward": 1.0}, 1.0),
        (FORMATTED, {"format_required": True}, 10.0),
        (FORMATTED, {"format_required": True, "format_reward": 0.5}, 10.5),  # whatever the format itself is worth
        ("yes", {"format_required": True, "format_reward": 0.5}, 0.0),
    ],
)
def test_the_format_is_rewarded_or_required(text: str, settings: dict[str, Any], score: float) -> None:
    assert reward(text, (Label("contains", "yes"),), verifiers={"contains": contains}, **settings).score == score


@pytest.mark.parametrize("finish", ["length", "tool_limit", "abort", "error", "repetition"])
def test_a_sample_that_did_not_end_by_itself_has_the_penalty_in_place_of_its_score(finish: str) -> None:
    assert reward(fields={"finish_reason": finish}, non_stop_penalty=-3.0).score == -3.0
    assert reward(fields={"finish_reason": finish}).score == 10.0


@pytest.mark.parametrize("finish", ["stop", "done"])
def test_a_sample_that_ended_by_itself_has_no_penalty(finish: str) -> None:
    assert reward(fields={"finish_reason": finish}, non_stop_penalty=-3.0).score == 10.0


def called(outcome: Any = "ok", output: str = "42", **fields: Any) -> ToolRecord:
    return ToolRecord(tool="t", turn=0, outcome=outcome, output=output, **fields)


@pytest.mark.parametrize(
    ("tools", "score"),
    [([called()], 10.0), ([], 0.0), ([called(output="")], 0.0), ([called(), called("timeout")], 0.0), ([called("error")], 0.0)],
)
def test_where_tools_must_succeed_verifiers_count_only_if_all_did(tools: list[ToolRecord], score: float) -> None:
    assert reward(fields={"tools": tools}, require_tool_success=True).score == score


@pytest.mark.parametrize(("kind", "score"), [("sum", 13.0), ("last", 12.0), (None, 10.0)])
def test_environments_add_the_rewards_that_they_gave(kind: Any, score: float) -> None:
    tools = [called(reward=1.0), called(reward=2.0), called()]
    assert reward(fields={"tools": tools}, environment_reward=kind).score == score


def test_a_sample_without_labels_or_tokens_is_worth_nothing() -> None:
    assert reward("", labels=()) == Reward(0.0, [])
    assert reward("").score == 0.0


async def raises(answer: Answer, value: Any) -> float:
    raise KeyError("tests")


async def hangs(answer: Answer, value: Any) -> float:
    await asyncio.sleep(3600)
    return 1.0


async def nan(answer: Answer, value: Any) -> float:
    return math.nan


async def nothing(answer: Answer, value: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("verifier", "words"), [(raises, "KeyError: 'tests'"), (hangs, "no score in 0.05"), (nan, "nan"), (nothing, "TypeError")]
)
def test_a_broken_verifier_is_an_error_of_its_sample_and_the_score_is_the_one_for_that(
    verifier: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    labels = (*LABELS, Label("broken", None))
    whole = reward(labels=labels, verifiers={"broken": verifier}, error_score=-1.0, seconds=0.05, non_stop_penalty=-3.0)
    assert whole.score == -1.0
    assert whole.error is not None
    assert whole.error.startswith("broken: ")
    assert words in whole.error
    assert [part.error is None for part in whole.parts] == [True, False]
    assert "sample train/0/p/0 has no score: broken" in caplog.text


def test_a_broken_verifier_does_not_touch_the_other_samples() -> None:
    async def breaks_on_no(answer: Answer, value: Any) -> float:
        return 1 / (answer.text != "no")

    config = RewardConfig(verifiers={"right": breaks_on_no})
    result = GenerationResult(request=request(labels=LABELS, n=2), samples=[sample(encode("no")), sample(encode("yes"), 1)])
    no, yes = (each.reward for each in run(config.build(TOKENIZER)(result)).samples)
    assert (no and no.error, yes and yes.error) == ("right: ZeroDivisionError: division by zero", None)
    assert yes
    assert yes.score == 10.0


def test_a_label_that_no_verifier_understands_is_refused_with_its_prompt_and_else_an_error_of_its_sample() -> None:
    unknown = request(labels=(Label("poetry", ""),))
    with pytest.raises(ConfigError, match="prompt train/0/p: there is no verifier poetry; there are right"):
        RewardConfig(verifiers={"right": right}).check(unknown)
    assert reward(labels=unknown.labels).error == "poetry: there is no such verifier"


def test_a_verifier_that_would_block_the_event_loop_is_refused() -> None:
    with pytest.raises(ConfigError, match="'slow' must be an async function"):
        RewardConfig(verifiers={"slow": lambda answer, value: 1.0})  # type: ignore[dict-item]


def test_verifiers_see_what_the_model_said_and_not_what_tools_did() -> None:
    texts = []

    async def look(answer: Answer, value: Any) -> float:
        texts.append(answer.text)
        return 0.0

    token_ids = encode("ask<|end|>yes42")
    config = RewardConfig(verifiers={"right": look})
    mask = [1] * 4 + [0] * 3 + [1] * 2
    run(config.build(TOKENIZER)(GenerationResult(request=request(labels=LABELS), samples=[sample(token_ids, mask=mask)])))
    assert texts == ["ask42"]


def test_each_sample_is_judged_by_the_label_of_its_own_prompt() -> None:
    config = RewardConfig(verifiers={"right": right}).build(TOKENIZER)
    results = [GenerationResult(request=request(labels=(Label("right", text),), index=9), samples=[sample(encode(text))]) for text in "ab"]
    assert [run(config(result)).samples[0].reward.score for result in reversed(results)] == [10.0, 10.0]  # type: ignore[union-attr]
