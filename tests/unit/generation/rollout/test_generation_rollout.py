"""The turn loop, driven by a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.rollouts import HANG, TOKENIZER, Say, ScriptedClient, decode, encode, harness, request, run, said

from instep.errors import ConfigError, GenerationError
from instep.generation import Completion, Harness, Limits, PromptId, RequestId, Sample, ToolSet, VersionSpan, answer
from instep.generation.rollout.turns import rollout
from instep.generation.statistics import metrics
from instep.generation.types import ToolRecord


def one(client: ScriptedClient, with_: Harness, **settings: Any) -> Sample:
    return run(rollout(request(**settings), 0, client, with_))


def test_an_answer_without_tools_is_what_the_engine_sampled() -> None:
    sample = one(ScriptedClient(said("one<|end|>")), harness())
    assert decode(sample.token_ids) == "one<|end|>"
    assert sample.logprobs == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert sample.mask == [1, 1, 1, 1]
    assert sample.versions == [VersionSpan("v1", 0, 4)]
    assert (sample.finish_reason, sample.turns, sample.tools, sample.error) == ("stop", 1, [], None)


def test_tool_output_follows_the_call_with_mask_0_and_the_model_goes_on() -> None:
    client = ScriptedClient(said("<say>x</say>"), said("done", versions=[("v1", 0, 1), ("v2", 1, 4)]))
    sample = one(client, harness(Say()))
    assert decode(sample.token_ids) == "<say>x</say>\n<output>\nsaid x\n</output>\ndone"
    tool = len(sample.token_ids) - 12 - 4
    assert sample.mask == [1] * 12 + [0] * tool + [1] * 4
    assert sample.logprobs[12 : 12 + tool] == [0.0] * tool
    assert sample.logprobs[-4:] == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert sample.versions == [VersionSpan("v1", 0, 12), VersionSpan("v1", 12 + tool, 13 + tool), VersionSpan("v2", 13 + tool, 16 + tool)]
    assert client.asked[1][2] == encode("hi") + sample.token_ids[: 12 + tool]


def test_the_next_turn_continues_the_sampled_tokens_not_their_text_encoded_again() -> None:
    sampled = [PIECE for text in ("he", "llo") for PIECE in encode(text)]
    assert encode("hello") != sampled
    client = ScriptedClient(said(sampled + encode("<say>x</say>")), said("end"))
    sample = one(client, harness(Say()))
    assert client.asked[1][2][2:4] == sampled
    assert sample.token_ids[:2] == sampled


def test_calls_are_read_from_the_tokens_that_were_kept_where_a_stop_string_ends_inside_one() -> None:
    token_ids = [*encode("<say>x"), 1004]  # the last token is `</say>\n`: an engine's text would end before the newline
    sample = one(ScriptedClient(said(token_ids), said("end")), harness(Say()))
    assert sample.token_ids[:7] == token_ids
    assert [record.arguments for record in sample.tools] == [{"text": "x"}]


def test_several_calls_of_a_turn_run_in_order_and_are_shown_together() -> None:
    log: list[str] = []
    first, second = Say(lambda text: log.append(text) or "1"), Say(lambda text: log.append(text) or "2", "tell")
    sample = one(ScriptedClient(said("<tell>b</tell> <say>a</say><tell>c</tell>"), said("end")), harness(first, second))
    assert log == ["b", "a", "c"]
    assert [(record.tool, record.output, record.turn) for record in sample.tools] == [("tell", "2", 0), ("say", "1", 0), ("tell", "2", 0)]
    assert decode(sample.token_ids).count("<output>") == 3


def test_a_model_out_of_calls_is_told_once_and_then_the_sample_ends_as_tool_limit() -> None:
    say = Say()
    client = ScriptedClient(*[said("<say>x</say><say>y</say>")] * 3)
    result = run(answer(request(), client, harness(say, max_tool_calls=3)))
    (sample,) = result.samples
    assert len(say.calls) == 3
    assert [record.outcome for record in sample.tools] == ["ok", "ok", "ok", "excess", "excess", "excess"]
    assert decode(sample.token_ids).count("no tool calls are left: 3 were allowed") == 1
    assert (sample.finish_reason, sample.turns) == ("tool_limit", 3)
    assert metrics([result])["tools/say/excess"] == 3.0  # kept up to the statistics


def test_a_model_may_answer_after_its_last_allowed_call() -> None:
    client = ScriptedClient(said("<say>x</say>"), said("the answer"))
    sample = one(client, harness(Say(), max_tool_calls=1))
    assert decode(sample.token_ids).endswith("the answer")
    assert sample.finish_reason == "stop"


def test_with_no_calls_allowed_a_call_is_refused_and_the_model_may_answer() -> None:
    say = Say()
    sample = one(ScriptedClient(said("<say>x</say>"), said("so be it")), harness(say, max_tool_calls=0))
    assert (say.calls, sample.tools[0].outcome, sample.finish_reason) == ([], "excess", "stop")


def test_budgets_shrink_by_every_token_of_the_response_tool_output_included() -> None:
    client = ScriptedClient(said("<say>x</say>"), said("<say>y</say>"), said("end"))
    sample = one(client, harness(Say(), max_turn_tokens=50), max_tokens=100)
    lengths = [len(prompt) - 2 for _, _, prompt, _ in client.asked]
    assert [sampling.max_tokens for *_, sampling in client.asked] == [min(50, 100 - length) for length in lengths]
    assert len(sample.token_ids) <= 100


@pytest.mark.parametrize("limits", [{"max_tokens": 30}, {"max_model_len": 32}], ids=["response", "context"])
def test_tool_output_that_ends_a_budget_is_cut_and_the_sample_ends_as_length(limits: dict[str, Any]) -> None:
    context = {name: limits.pop(name) for name in list(limits) if name == "max_model_len"}
    client = ScriptedClient(said("<say>x</say>"))
    sample = one(client, harness(Say(lambda text: "y" * 50), **context), **limits)
    assert len(sample.token_ids) == len(sample.mask) == len(sample.logprobs) == 30
    assert sample.mask == [1] * 12 + [0] * 18
    assert sample.cut == len("\n<output>\n" + "y" * 50 + "\n</output>\n") - 18
    assert (sample.finish_reason, sample.turns) == ("length", 1)


def test_a_call_in_a_turn_that_used_up_the_response_is_not_run() -> None:
    say = Say()
    sample = one(ScriptedClient(said("<say>x</say>", "length")), harness(say), max_tokens=12)
    assert (say.calls, sample.finish_reason) == ([], "length")


def test_a_turn_that_ends_at_its_own_limit_ends_the_sample_as_length_unless_it_calls_a_tool() -> None:
    calling = ScriptedClient(said("<say>x</say>", "length"), said("and so on", "length"))
    sample = one(calling, harness(Say(), max_turn_tokens=12))
    assert ([record.outcome for record in sample.tools], sample.turns, sample.finish_reason) == (["ok"], 2, "length")


def test_a_prompt_that_fills_the_context_gives_an_empty_sample_and_asks_no_engine() -> None:
    client = ScriptedClient(said("never"))
    sample = one(client, harness(max_model_len=5), prompt="too long")
    assert (sample.token_ids, sample.finish_reason, sample.turns, client.asked) == ([], "length", 0, [])
    assert sample.error == "the prompt has 8 tokens, which leave no room in a context of 5"


def test_an_empty_response_is_an_empty_sample() -> None:
    sample = one(ScriptedClient(said("")), harness(Say()))
    assert (sample.token_ids, sample.logprobs, sample.mask, sample.versions, sample.finish_reason) == ([], [], [], [], "stop")


def test_only_samples_with_tools_stop_at_the_strings_that_end_calls() -> None:
    with_, without = ScriptedClient(said("a")), ScriptedClient(said("<say>x</say>"))
    machine = harness(Say())
    one(with_, machine, stop=("END", "</say>"))
    sample = one(without, machine, tools=(), stop=("END",))
    assert with_.asked[0][3].stop == ("END", "</say>")
    assert without.asked[0][3].stop == ("END",)
    assert (sample.tools, sample.finish_reason) == ([], "stop")  # what looks like a call is its answer


def test_a_sample_can_call_the_tools_of_its_own_set_alone() -> None:
    say, tell = Say(), Say(name="tell")
    client = ScriptedClient(said("<tell>x</tell><say>y</say>"), said("end"))
    sample = one(client, harness(say, tell), tools=("say",))
    assert client.asked[0][3].stop == ("</say>",)
    assert (say.calls, tell.calls, len(sample.tools)) == ([{"text": "y"}], [], 1)


def test_a_request_for_a_tool_that_is_not_there_is_refused_before_an_engine_is_asked() -> None:
    client = ScriptedClient(said("never"))
    with pytest.raises(ConfigError, match="there is no tool fly; there are say"):
        run(answer(request(tools=("fly",)), client, harness(Say())))
    assert client.asked == []


def test_tools_without_a_parser_are_refused() -> None:
    tools = run(ToolSet.connect([Say()]))
    with pytest.raises(ConfigError, match="no parser"):
        Harness(TOKENIZER, Limits(max_model_len=10), tools)


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_what_the_engine_says_of_an_end_is_kept_and_calls_in_it_are_not_run(reason: str) -> None:
    say = Say()
    sample = one(ScriptedClient(said("<say>x</say>", reason)), harness(say))
    assert (sample.finish_reason, say.calls) == (reason, [])
    assert decode(sample.token_ids) == "<say>x</say>"


def test_samples_come_in_order_with_a_seed_each_and_another_for_every_turn() -> None:
    client = ScriptedClient(said("<say>x</say>"), said("end"))
    result = run(answer(request(n=3, seed=7), client, harness(Say())))
    seeds = {(id.sample, turn): sampling.seed for id, turn, _, sampling in client.asked}
    assert [sample.id for sample in result.samples] == [RequestId(PromptId("train", 0, "p"), sample) for sample in range(3)]
    assert [seeds[sample, 0] for sample in range(3)] == [7, 8, 9]
    assert len(set(seeds.values())) == 6
    assert all(sampling.n == 1 for *_, sampling in client.asked)


def test_the_same_prompt_of_another_round_or_split_has_other_ids() -> None:
    ids = [PromptId(split, round, "p") for split in ("train", "eval") for round in range(3)]
    assert len({str(RequestId(id, 0)) for id in ids}) == len(ids)


def test_min_tokens_count_down_over_the_turns() -> None:
    client = ScriptedClient(said("<say>x</say>"), said("end"))
    one(client, harness(Say()), min_tokens=20)
    assert [sampling.min_tokens for *_, sampling in client.asked] == [20, 8]


def broken(**changes: Any) -> Completion:
    fields: dict[str, Any] = {
        "token_ids": [97, 98],
        "logprobs": [-1.0, -1.0],
        "finish_reason": "stop",
        "versions": [VersionSpan("v1", 0, 2)],
    }
    return Completion(**{**fields, **changes})


@pytest.mark.parametrize(
    ("completion", "words"),
    [
        (broken(logprobs=[]), "has 0 log-probabilities"),
        (broken(logprobs=[-1.0]), "has 1 log-probabilities"),
        (broken(logprobs=[-1.0, float("nan")]), "log-probability nan at position 1"),
        (broken(logprobs=[float("-inf"), -1.0]), "log-probability -inf at position 0"),
        (broken(logprobs=[-1.0, 1.0]), "log-probability 1.0 at position 1"),
        (broken(versions=[]), "version spans"),
        (broken(versions=[VersionSpan("v1", 0, 1)]), "version spans"),
        (broken(versions=[VersionSpan("v1", 0, 3)]), "version spans"),
        (broken(versions=[VersionSpan("v1", 0, 1), VersionSpan("v2", 0, 2)]), "version spans"),
        (broken(token_ids=[1] * 99, logprobs=[-1.0] * 99, versions=[VersionSpan("v1", 0, 99)]), "exceeds the 10 that were asked for"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_an_error_that_names_the_sample(completion: Completion, words: str) -> None:
    with pytest.raises(GenerationError, match=words) as error:
        one(ScriptedClient(completion), harness(), max_tokens=10)
    assert "train/0/p/0, turn 0" in str(error.value)


def test_an_engine_that_fails_ends_the_prompt_and_cancels_its_other_samples() -> None:
    def second_fails(prompt: list[int], sampling: Any) -> Completion:
        raise RuntimeError("the engine died") if sampling.seed == 1 else AssertionError

    class Client(ScriptedClient):
        async def complete(self, prompt_token_ids: Any, sampling: Any, id: RequestId, turn: int) -> Completion:
            self.turns = (second_fails,) if id.sample == 1 else (HANG,)
            return await super().complete(prompt_token_ids, sampling, id, turn)

    client = Client()
    with pytest.raises(RuntimeError, match="the engine died"):
        run(answer(request(n=3, seed=0), client, harness()))
    assert sorted(id.sample for id in client.cancelled) == [0, 2]


def test_a_call_under_an_unknown_name_and_one_that_cannot_be_read_are_told_to_the_model() -> None:
    from instep.generation.tools.parsers import ChatParser

    turns = {"fly": [("fly", "{}")], "bad": [("say", '{"text": ')], "none": None, "list": [("say", "[1]")], "miss": [("say", "{}")]}
    client = ScriptedClient(*[said(f"{text}<|end|>") for text in turns], said("end<|end|>"))
    parser = ChatParser(TOKENIZER, lambda text, tools: turns.get(text.removesuffix("<|end|>"), []))
    sample = one(client, harness(Say(), parser=parser))
    assert [record.outcome for record in sample.tools] == ["unknown", *["malformed"] * 4]
    for words in ("no tool fly; there are say", "not valid JSON", "could not be read", "must be a JSON object", "'text' is a required"):
        assert words in decode(sample.token_ids)
    assert sample.finish_reason == "stop"


def test_an_observation_is_the_error_too_where_the_output_is_empty() -> None:
    assert ToolRecord(tool="t", turn=0, outcome="error", error="it broke").observation == "Error: it broke"
    assert ToolRecord(tool="t", turn=0, outcome="error", output="half", error="it broke").observation == "half\nError: it broke"
