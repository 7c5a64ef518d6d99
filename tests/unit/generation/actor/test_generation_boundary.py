"""Nothing that a model, a tool, a reward or a prompt says ends an actor, or what it has under way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from helpers.real_tokenizers import MADE
from helpers.rollouts import TOKENIZER, Room, Say, ScriptedClient, encode, harness, request, run, said
from helpers.serving import SOON, FakeServing, Fleet
from helpers.strange_things import ENDS, WRONG, strange_prompts

from instep.generation import (
    ChatParser,
    GenerationResult,
    Label,
    LLMActor,
    PromptId,
    PromptRequest,
    RequestId,
    RewardConfig,
    Sample,
    Sampling,
    TaggedParser,
    ToolOutput,
)
from instep.generation.rollout.turns import rollout
from instep.generation.tools.parsers import readable


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.stop()


def of_turns(text: str, *tools: Any) -> Sample:
    """The sample of a model that says this, and then ends."""
    client = ScriptedClient(said(text), said("ok"))
    made = run(rollout(request(max_tokens=9000), 0, client, harness(*tools, max_model_len=9999)))
    msgspec.json.encode(made)
    return made


NESTED = ["[" * 1000, '{"a":' * 1000, "[" * 300 + "]" * 300, '{"a":' * 100 + "1" + "}" * 100]


@pytest.mark.parametrize("text", NESTED, ids=["lists", "objects", "closed-lists", "closed-objects"])
@pytest.mark.parametrize("kind", ["integer", "number", "array", "object", "boolean"])
def test_arguments_of_any_depth_are_a_malformed_call_that_the_model_is_told_of(kind: str, text: str) -> None:
    tool = Say(name="num", n={"type": kind})
    sample = of_turns(f"<num>{text}</num>", tool)
    assert [record.outcome for record in sample.tools] == ["malformed"]
    assert (tool.calls, sample.finish_reason, sample.turns) == ([], "stop", 2)


@pytest.mark.parametrize("arguments", [*NESTED, '{"text": ' + "[" * 80 + "]" * 80 + "}", '{"text": NaN}', '{"text": 1e999}', "9" * 9999])
def test_json_that_is_too_deep_or_holds_no_number_is_an_error_of_its_call(arguments: str) -> None:
    parser = ChatParser(TOKENIZER, lambda text, tools: [("say", arguments)])
    (call,) = map(readable, parser.parse("", []))
    assert (call.arguments, bool(call.error)) == ({}, True)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize(
    "call",
    [{"name": "say", "arguments": {"text": "\ud83d"}}, {"name": "\ud83d", "arguments": {}}, {"name": "say", "arguments": {"\ud83d": 1}}],
)
def test_half_a_surrogate_pair_in_a_name_or_an_answer_is_replaced(kind: str, call: dict[str, Any]) -> None:
    tokenizer = MADE[kind]()
    parser = ChatParser(tokenizer, lambda text, tools: [(call["name"], json.dumps(call["arguments"]))] if "call" in text else [])
    client = ScriptedClient(said("call"), said("ok"))
    made = run(rollout(request(), 0, client, harness(Say(lambda text: text + "\udc80\0"), parser=parser)))
    assert (made.finish_reason, made.error, len(made.tools)) == ("stop", None, 1)
    msgspec.json.encode(made)


@pytest.mark.parametrize("answer", WRONG.values(), ids=list(WRONG))
def test_what_no_tool_may_answer_is_told_to_the_model_and_is_in_the_record(answer: Any) -> None:
    sample = of_turns("<say>x</say>", Say(lambda text: answer))
    assert [record.outcome for record in sample.tools] == ["error"]
    assert "say answered" in str(sample.tools[0].error)
    assert sample.turns == 2
    score = RewardConfig(environment_reward="sum").build(TOKENIZER)
    reward = run(score(GenerationResult(request=request(), samples=[sample]))).samples[0].reward
    assert reward
    assert reward.score == 0.0
    assert bool(reward.error) == (isinstance(answer, ToolOutput) and answer.reward is not None)


@pytest.mark.parametrize("role", ["environment", "", "\ud83d", "system" * 1000])
def test_a_role_that_the_chat_template_refuses_ends_its_sample_with_its_tokens_and_the_reason(role: str) -> None:
    parser = ChatParser(MADE["byte_level"](), lambda text, tools: [("say", '{"text": ""}')])
    client = ScriptedClient(said("call"), said("ok"))
    sample = run(rollout(request(), 0, client, harness(Say(lambda text: ToolOutput(text="x", role=role)), parser=parser)))
    assert (sample.finish_reason, sample.token_ids) == ("error", encode("call"))
    assert "could not be shown to the model: TemplateError: unknown role" in str(sample.error)
    msgspec.json.encode(sample)


@pytest.fixture(scope="module")
def shared() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.stop()


class Door(Room):
    """An environment that raises what its sample's prompt says."""

    @asynccontextmanager
    async def session(self, id: RequestId, config: dict[str, Any]) -> AsyncIterator[Say]:
        raises(id, "opened")
        yield Say(lambda text: "x", self.name)
        raises(id, "closed")


class Broken(TaggedParser):
    def parse(self, text: str, tools: Any) -> Any:
        raises(None, "parser")
        return super().parse(text, tools)

    def observe(self, records: Any, last_token_id: int) -> Any:
        raises(None, "shown")
        return super().observe(records, last_token_id)


class Tokens(type(TOKENIZER)):  # type: ignore[misc]
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        if not skip_special_tokens:
            raises(None, "decoded")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


WHO = ["tool", "parser", "shown", "opened", "closed", "verifier", "decoded"]
NOW: dict[str, BaseException] = {}
"""Who raises what: one prompt with tools is under way at a time."""


def raises(id: RequestId | None, who: str) -> None:
    if who in NOW:
        raise NOW[who]


async def broken_verifier(answer: Any, value: Any) -> float:
    raises(None, "verifier")
    return 1.0


@pytest.fixture(scope="module")
def door(shared: Fleet) -> LLMActor:
    def says(prompt: list[int]) -> str:
        return "<say>x</say>" if prompt == encode("say") else "x<|end|>"

    def tool(text: str) -> str:
        raises(None, "tool")
        return "x"

    return shared.actor(
        FakeServing(says, hold=2), tools=[Say(tool), Door()], tool_parser=Broken, tokenizer=Tokens(),
        reward_config=RewardConfig(verifiers={"v": broken_verifier}),
    )  # fmt: skip


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("who", WHO)
def test_whoever_raises_whatever_costs_its_sample_alone(door: LLMActor, shared: Fleet, who: str, error: BaseException) -> None:
    serving = door._started()
    serving.go.clear()  # type: ignore[attr-defined]
    beside = PromptRequest(id=PromptId("train", 0, "beside"), prompt_token_ids=[9, 9], tools=(), sampling=Sampling(max_tokens=20))
    NOW[who] = error
    try:
        under_way, strange = door.submit(beside), door.submit(shared.ask("strange", labels=(Label("v", 1),)))
        serving.release()  # type: ignore[attr-defined]
        sample = strange.result(SOON).samples[0]
    finally:
        NOW.clear()
    assert under_way.result(SOON).samples[0].finish_reason == "stop"
    door.check_background_threads()
    name = type(error).__name__ if not isinstance(error, StopIteration | asyncio.CancelledError) else ""
    if who == "tool":
        assert name in str(sample.tools[0].error)
    elif who == "verifier":
        assert name in str(sample.reward.error)
    elif who == "parser" and isinstance(error, Exception):
        assert sample.tools[0].outcome == "malformed"
    elif who == "closed":
        assert sample.finish_reason == "stop"
    else:
        assert sample.finish_reason == "error"
        assert name in str(sample.error)


async def nothing(answer: Any, value: Any) -> Any:
    return value


def test_a_prompt_that_is_none_is_answered_with_its_error_and_nothing_under_way_is_lost(fleet: Fleet) -> None:
    rewards = RewardConfig(verifiers={"v": nothing})
    serving = FakeServing("hi<|end|>", hold=1)
    settings = {"tools": [Say()], "tool_parser": TaggedParser, "reward_config": rewards}
    first, *others = (fleet.actor(each, **settings) for each in (serving, FakeServing("hi<|end|>"), FakeServing("hi<|end|>")))
    under_way = first.submit(fleet.ask("under-way"))
    for name, strange in strange_prompts().items():
        fleet.prompts.put(strange)
        refused = fleet.results.get(timeout=SOON)
        assert (name, bool(refused.error if hasattr(refused, "error") else refused.samples[0].error)) == (name, True)
    serving.release()
    assert under_way.result(SOON).samples[0].finish_reason == "stop"
    for actor in (first, *others):
        actor.check_background_threads()
        assert actor.stop() == []


def test_token_ids_of_numpy_are_token_ids(fleet: Fleet) -> None:
    import numpy as np

    fleet.actor(FakeServing("hi<|end|>"))
    fleet.prompts.put(PromptRequest(id=PromptId("train", 0, "a"), prompt_token_ids=list(np.array([65, 66]))))
    assert fleet.results.get(timeout=SOON).request.prompt_token_ids == [65, 66]


def test_a_result_that_the_queue_does_not_take_is_answered_with_the_reason(fleet: Fleet) -> None:
    class Picky(type(fleet.results)):  # type: ignore[misc]
        def put(self, item: GenerationResult, *arguments: Any, **settings: Any) -> None:
            if any(record.info for sample in item.samples for record in sample.tools):
                raise TypeError("cannot pickle '_thread.lock' object")
            super().put(item, *arguments, **settings)

    fleet.results = Picky()
    serving = FakeServing(lambda prompt: "<say>x</say>" if prompt == encode("say") else "so<|end|>")
    actor = fleet.actor(serving, tools=[Say(lambda text: ToolOutput(info={"lock": threading.Lock()}))], tool_parser=TaggedParser)
    fleet.prompts.put(fleet.ask("locked"))
    sample = fleet.results.get(timeout=SOON).samples[0]
    actor.check_background_threads()
    assert (sample.finish_reason, "cannot pickle" in str(sample.error)) == ("error", True)
