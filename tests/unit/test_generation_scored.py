"""Scores: finite numbers or errors, judged beside the engine, in turns."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rollouts import TOKENIZER, request, run
from sample_records import sample
from serving import SOON, FakeServing, Fleet

from instep.generation import GenerationResult, Label, PromptId, RewardConfig
from instep.generation.types import Reward
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
    with pytest.raises(Exception, match=f"{name} must be a finite number"):
        RewardConfig(**{name: math.nan})


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
