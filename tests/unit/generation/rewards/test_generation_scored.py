"""Scores: finite numbers or errors, judged beside the engine, in turns."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.rollouts import TOKENIZER, encode, request, run
from helpers.sample_records import sample
from helpers.serving import SOON, FakeServing, Fleet

from instep.generation import CodeTests, Format, GenerationResult, Label, PromptId, RewardConfig
from instep.generation.sandbox import Run
from instep.generation.types import Reward
from instep.generation.verifiers import code
from instep.generation.waiting import Turnstile


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.stop()


class Unprintable:
    def __str__(self) -> str:
        raise RecursionError

    __repr__ = __str__


def test_a_verifier_that_blocks_its_event_loop_keeps_no_engine_waiting(fleet: Fleet) -> None:
    over = threading.Event()

    async def blocks(answer: Any, value: Any) -> float:
        return float(over.wait(SOON))

    fleet.actor(FakeServing("hi<|end|>"), reward_config=RewardConfig(verifiers={"blocks": blocks}))
    fleet.prompts.put(fleet.ask("judged", labels=(Label("blocks", 1),)))
    actor = fleet.actors[0]
    assert actor.cancel(PromptId("train", 0, "nobody")) is False
    for _ in range(3):
        actor.status()  # of the loop that the engine is on
    over.set()
    assert fleet.results.get(timeout=SOON).samples[0].reward.score == 10.0


async def nothing(answer: Any, value: Any) -> Any:
    return value


def scored(value: Any) -> Reward:
    result = GenerationResult(request=request(labels=(Label("v", value),)), samples=[sample([])])
    (judged,) = run(RewardConfig(verifiers={"v": nothing}).build(TOKENIZER)(result)).samples
    assert judged.reward
    return judged.reward


@pytest.mark.parametrize("value", ["1", "nan", b"1", math.nan, math.inf, 10**400, None, [1], Unprintable()])
def test_a_score_is_a_finite_number_or_an_error(value: Any) -> None:
    assert (scored(value).score, bool(scored(value).error)) == (0.0, True)


def test_scores_that_are_finite_and_whose_sum_is_not_are_an_error() -> None:
    assert (scored(1e308).score, scored(1e308).error) == (0.0, "the score is inf")


@pytest.mark.parametrize("name", ["verification_reward", "format_reward", "non_stop_penalty", "error_score"])
def test_a_reward_config_takes_finite_numbers_alone(name: str) -> None:
    given: dict[str, Any] = {name: math.nan}
    with pytest.raises(Exception, match=f"{name} must be a finite number"):
        RewardConfig(**given)


def test_the_time_of_a_verifier_begins_when_its_turn_has_come() -> None:
    class Slow:
        def __init__(self) -> None:
            self.turnstile = Turnstile(1)

        async def __call__(self, answer: Any, value: Any) -> float:
            await asyncio.sleep(0.05)
            return 1.0

    result = GenerationResult(request=request(labels=(Label("v", 1),), n=20), samples=[sample([])] * 20)
    judged = run(RewardConfig(verifiers={"v": Slow()}, seconds=0.8).build(TOKENIZER)(result)).samples
    assert [one.reward.error for one in judged if one.reward] == [None] * 20


FOREVER = "```python\nwhile True: pass\n```"
BACKTRACKS = Format("(?:a|aa)+b", seconds=0.3)
LATE: list[tuple[Any, Any, str]] = [
    (CodeTests(seconds=1.0), [{"input": "", "output": "2"}], FOREVER),
    (CodeTests(seconds=1.0), ["assert f() == 2"], FOREVER),
    (BACKTRACKS, None, "a" * 1000),
]


@pytest.mark.parametrize(("verifier", "label", "text"), LATE, ids=["output", "statements", "pattern"])
def test_an_answer_that_takes_all_time_that_its_verifier_gives_scores_0_however_short_the_reward_is(
    verifier: Any, label: Any, text: str
) -> None:
    result = GenerationResult(request=request(labels=(Label("v", label),), n=6), samples=[sample(encode(text))] * 6)
    judged = run(RewardConfig(verifiers={"v": verifier}, seconds=0.2).build(TOKENIZER)(result)).samples
    assert [(one.reward.score, one.reward.error) for one in judged if one.reward] == [(0.0, None)] * 6


def test_a_required_format_that_takes_all_its_time_is_not_met() -> None:
    result = GenerationResult(request=request(), samples=[sample(encode("a" * 1000))])
    (judged,) = run(RewardConfig(format=BACKTRACKS, format_reward=1.0, seconds=0.1).build(TOKENIZER)(result)).samples
    assert judged.reward
    assert (judged.reward.score, judged.reward.error) == (0.0, None)


def test_no_more_programs_run_at_the_same_time_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    async def counted(*given: Any, **named: Any) -> Run:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return Run(output="2", end="exit", code=0, seconds=0.01)

    monkeypatch.setattr(code, "run_python", counted)
    label = Label("v", [{"input": "", "output": "2"}] * 3)
    result = GenerationResult(request=request(labels=(label,), n=8), samples=[sample(encode("print(2)"))] * 8)
    judged = run(RewardConfig(verifiers={"v": CodeTests(at_once=2)}).build(TOKENIZER)(result)).samples
    assert [one.reward.score for one in judged if one.reward] == [10.0] * 8
    assert most == 2


def test_what_waits_for_its_turn_comes_in_order_and_passes_it_on_where_it_is_cancelled() -> None:
    async def main() -> list[int]:
        stile, order = Turnstile(1), list[int]()

        async def one(number: int) -> None:
            async with stile:
                order.append(number)
                await asyncio.sleep(0)

        async with stile:
            tasks = [asyncio.ensure_future(one(number)) for number in range(4)]
            await asyncio.sleep(0)
            tasks[1].cancel()
        tasks[2].get_loop().call_soon(tasks[2].cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        async with stile:
            return order

    assert run(main()) == [0, 3]
