"""What Open Instruct's pure functions do, case by case, and where instep differs because they lose something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.rollouts import TOKENIZER, Say, ScriptedClient, encode, harness, request, run, said
from helpers.sample_records import sample
from hypothesis import given
from hypothesis import strategies as st

from instep.engine.vllm.serving import PLAIN_TEMPLATE, template_for
from instep.generation import Limits, answer
from instep.generation.batch import collate
from instep.generation.rollout.budget import room, truncate, turn_tokens
from instep.generation.statistics import metrics, token_statistics
from instep.generation.types import GenerationResult, ToolRecord

COUNT = st.integers(0, 60)


@given(context=st.integers(1, 80), budget=st.integers(1, 60), prompt=COUNT, response=COUNT, tool=COUNT)
def test_tool_tokens_are_cut_to_the_context_first_and_then_to_the_responses_budget(
    context: int, budget: int, prompt: int, response: int, tool: int
) -> None:
    """Theirs, in two steps: what exceeds the context is cut from the end, all of it if nothing fits; then what exceeds the budget."""
    tokens = list(range(tool))
    excess = max(0, prompt + response + tool - context)
    theirs = [] if excess >= tool else tokens[: tool - excess]
    theirs = theirs[: max(0, budget - response)]
    assert truncate(tokens, room(Limits(max_model_len=context), budget, prompt, response)) == (theirs, tool - len(theirs))


@pytest.mark.parametrize(("response", "context", "per_turn"), [(50, 100, None), (50, 30, None), (50, 100, 7), (3, 100, 7), (50, 5, 7)])
def test_a_turn_may_use_what_the_tightest_budget_leaves(response: int, context: int, per_turn: int | None) -> None:
    theirs = max(1, min(response, context - 10, per_turn or 10**9)) if context > 10 else None
    left = room(Limits(max_model_len=context, max_turn_tokens=per_turn), response, 10, 0)
    if theirs is None:  # they ask for one token more than the context holds; here no turn begins
        assert left == 0
    else:
        assert turn_tokens(Limits(max_model_len=context, max_turn_tokens=per_turn), left) == theirs


@pytest.mark.parametrize(("mask_tool_use", "expected"), [(True, [1, 1, 0, 0, 1]), (False, [1, 1, 1, 1, 1])])
def test_tool_tokens_are_masked_or_not_and_have_no_log_probability(mask_tool_use: bool, expected: list[int]) -> None:
    one = sample(encode("abxxc"), logprobs=[-1.0, -2.0, 0.0, 0.0, -3.0], mask=[1, 1, 0, 0, 1], versions=[])
    batch = collate([GenerationResult(request=request("p"), samples=[one])], 0, train_on_tool_output=not mask_tool_use)
    assert batch.response_mask[0, 1:].int().tolist() == expected
    assert batch.logprobs[0, 1:].tolist() == [-1.0, -2.0, 0.0, 0.0, -3.0]


def test_samples_are_merged_in_the_order_of_their_numbers_with_the_seed_of_each() -> None:
    client = ScriptedClient(said("a<|end|>"))
    result = run(answer(request(n=3, seed=7), client, harness()))
    assert [one.id.sample for one in result.samples] == [0, 1, 2]
    assert sorted((id.sample, sampling.seed) for id, _, _, sampling in client.asked) == [(0, 7), (1, 8), (2, 9)]


def test_without_tools_every_token_is_the_models() -> None:
    one = run(answer(request(), ScriptedClient(said("abc")), harness())).samples[0]
    assert (one.mask, len(one.logprobs), one.tools) == ([1, 1, 1], 3, [])


@pytest.mark.parametrize(
    ("turns", "limits", "theirs", "here"),
    [
        (["<say>x</say>", "<say>y</say>", "<say>z</say>"], {"max_tool_calls": 1}, "stop", "tool_limit"),
        (["<say>x</say>"], {"max_model_len": 20}, "stop", "length"),
        (["abc"], {}, "stop", "stop"),
    ],
)
def test_a_sample_says_why_it_ended_where_theirs_says_why_the_last_turn_did(
    turns: list[str], limits: dict[str, Any], theirs: str, here: str
) -> None:
    client = ScriptedClient(*(said(turn) for turn in turns))
    assert run(answer(request(), client, harness(Say(), **limits))).samples[0].finish_reason == here
    assert client.turns[-1].finish_reason == theirs  # type: ignore[union-attr]


def test_calls_over_the_limit_reach_the_metrics_which_theirs_lose_when_results_are_merged() -> None:
    calls = [ToolRecord(tool="say", turn=0, outcome="ok"), ToolRecord(tool="say", turn=1, outcome="excess")]
    results = [GenerationResult(request=request("p"), samples=[sample(encode("a"), tools=calls)]) for _ in range(2)]
    assert (metrics(results)["tools/say/calls"], metrics(results)["tools/say/excess"]) == (2.0, 1.0)


def test_statistics_count_prompt_once_and_response_tokens_of_all_samples() -> None:
    result = GenerationResult(request=request("four"), samples=[sample(encode("ab")), sample(encode("abc"), 1, seconds=3.0)])
    found = token_statistics(result)
    assert (found.prompt_tokens, found.response_tokens, found.seconds) == (4, 5, 3.0)


def test_a_tokenizer_without_a_chat_template_has_a_plain_one_for_http() -> None:
    from jinja2 import Template

    assert template_for(None) is None
    assert template_for(SimpleNamespace(chat_template="theirs")) is None
    assert template_for(TOKENIZER) == PLAIN_TEMPLATE
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert Template(PLAIN_TEMPLATE).render(messages=messages) == "ab"
