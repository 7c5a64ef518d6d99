"""Whatever an engine samples and tools answer: no budget is exceeded, and everything that is known of tokens lines up with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from helpers.rollouts import TOKENIZER, Say, encode, harness, request, run
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import ConfigError
from instep.generation import Completion, Harness, Limits, RequestId, Sample, Sampling, VersionSpan
from instep.generation.rollout.budget import room, shorten, truncate, turn_tokens
from instep.generation.rollout.turns import rollout
from instep.generation.tools.parsers import TaggedParser

COUNTS = st.integers(0, 40)
POSITIVE = st.integers(1, 40)


class RandomClient:
    """Samples tokens of random turns, with calls among them, and changes the weights in between. Keeps all that it handed out."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.version = 0
        self.handed: list[tuple[list[int], Sampling, Completion]] = []

    async def complete(self, prompt_token_ids: Sequence[int], sampling: Sampling, id: RequestId, turn: int) -> Completion:
        words = [self.random.choice(["a", "hello", "<say>x</say>", "<say>", "</say>", "é"]) for _ in range(self.random.randint(0, 6))]
        wanted = encode("".join(words) + self.random.choice(["", "<|end|>"]))
        token_ids = wanted[: sampling.max_tokens]
        spans, start = [], 0
        while start < len(token_ids):
            end = self.random.randint(start, len(token_ids))
            spans.append(VersionSpan(f"v{self.version}", start, end))
            self.version += self.random.random() < 0.7
            start = end
        finish = "length" if len(token_ids) == sampling.max_tokens else self.random.choice(["stop"] * 9 + ["abort"])
        logprobs = [-self.random.random() for _ in token_ids]
        completion = Completion(token_ids=token_ids, logprobs=logprobs, finish_reason=finish, versions=spans)  # type: ignore[arg-type]
        self.handed.append((list(prompt_token_ids), sampling, completion))
        return completion

    async def abort(self, id: RequestId) -> None:
        raise AssertionError("nobody aborts here")


@given(
    seed=st.integers(0, 2**32), prompt=POSITIVE, max_tokens=st.integers(1, 120), context=st.integers(1, 150), turn=st.none() | POSITIVE,
    calls=st.integers(0, 3), output=COUNTS, output_tokens=st.none() | POSITIVE,
)  # fmt: skip
def test_a_sample_keeps_every_budget_and_its_parts_line_up(
    seed: int, prompt: int, max_tokens: int, context: int, turn: int | None, calls: int, output: int, output_tokens: int | None
) -> None:
    client = RandomClient(seed)
    limits = Limits(max_model_len=context, max_turn_tokens=turn, max_tool_calls=calls, max_tool_output_tokens=output_tokens)
    machine = Harness(TOKENIZER, limits, harness(Say(lambda text: "o" * output)).tools, TaggedParser(TOKENIZER))
    asked = request("p" * prompt, max_tokens=max_tokens)
    sample = run(rollout(asked, 0, client, machine))

    assert len(sample.token_ids) == len(sample.logprobs) == len(sample.mask)
    assert len(sample.token_ids) <= max_tokens
    assert not sample.token_ids or prompt + len(sample.token_ids) <= context
    assert sum(record.outcome in ("ok", "error") for record in sample.tools) <= calls
    assert sample.turns == len(client.handed)
    check_tokens(sample, client)
    check_spans(sample)
    check_end(sample, max_tokens, context - prompt, turn)


def check_tokens(sample: Sample, client: RandomClient) -> None:
    """The model's tokens are the engine's, each with its own log-probability, and each turn saw all that came before."""
    own = [index for index, mine in enumerate(sample.mask) if mine]
    handed = [(token, logprob) for _, _, answer in client.handed for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert [(sample.token_ids[index], sample.logprobs[index]) for index in own] == handed
    assert all(logprob == 0.0 for logprob, mine in zip(sample.logprobs, sample.mask, strict=True) if not mine)
    prompt = client.handed[0][0] if client.handed else []
    for seen, sampling, answer in client.handed:
        assert seen == [*prompt, *sample.token_ids][: len(seen)]
        assert len(answer.token_ids) <= sampling.max_tokens
        assert sampling.min_tokens <= sampling.max_tokens


def check_spans(sample: Sample) -> None:
    """Spans are the model's tokens, in order, none twice; neighbours of one version are one span."""
    covered = [index for span in sample.versions for index in range(span.start, span.end)]
    assert covered == [index for index, mine in enumerate(sample.mask) if mine]
    assert all(span.start < span.end for span in sample.versions)
    assert not any(a.end == b.start and a.version == b.version for a, b in pairwise(sample.versions))
    numbers = [int(span.version[1:]) for span in sample.versions]
    assert numbers == sorted(numbers)


def check_end(sample: Sample, response: int, context: int, turn: int | None) -> None:
    """A sample that a budget ended says `length`, and no other does."""
    full = len(sample.token_ids) >= min(response, max(context, 0))
    if sample.finish_reason in ("stop", "tool_limit", "abort"):
        assert not full
    else:
        assert sample.finish_reason == "length"
        assert full or turn is not None


@given(prompt=COUNTS, response=COUNTS, max_tokens=POSITIVE, context=POSITIVE, turn=st.none() | POSITIVE)
def test_room_is_what_the_tighter_budget_leaves(prompt: int, response: int, max_tokens: int, context: int, turn: int | None) -> None:
    limits = Limits(max_model_len=context, max_turn_tokens=turn)
    left = room(limits, max_tokens, prompt, response)
    assert left == max(0, min(max_tokens - response, context - prompt - response))
    assert turn_tokens(limits, left) == (left if turn is None else min(left, turn))


@pytest.mark.parametrize(
    ("prompt", "response", "max_tokens", "context", "tokens", "kept", "cut"),
    [
        (10, 0, 50, 100, 5, 5, 0),  # fits
        (96, 0, 50, 100, 10, 4, 6),  # the context cuts
        (10, 45, 50, 100, 10, 5, 5),  # the response's budget cuts
        (90, 5, 50, 100, 10, 5, 5),  # both would
        (100, 0, 50, 100, 10, 0, 10),  # no context is left
        (120, 0, 50, 100, 10, 0, 10),  # less than none
        (10, 50, 50, 100, 10, 0, 10),  # no budget is left
        (10, 0, 50, 100, 0, 0, 0),  # nothing to show
    ],
)
def test_tool_output_is_cut_at_its_end_to_what_fits(
    prompt: int, response: int, max_tokens: int, context: int, tokens: int, kept: int, cut: int
) -> None:
    token_ids = list(range(tokens))
    assert truncate(token_ids, room(Limits(max_model_len=context), max_tokens, prompt, response)) == (token_ids[:kept], cut)


def test_short_text_is_left_alone_and_long_text_says_what_is_missing() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcde", 3) == "abc\n... (2 more characters left out)"


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 0}, {"max_turn_tokens": 0}, {"max_tool_calls": -1}, {"tool_timeout": 0}, {"sample_timeout": float("inf")},
        {"max_tool_output_tokens": 0}, {"max_tool_output_chars": 0}, {"tool_timeout": float("nan")},
    ],
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Limits(**{"max_model_len": 10, **settings})  # type: ignore[arg-type]
