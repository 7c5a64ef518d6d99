"""Prompts and results of a fleet whose actors die."""

from __future__ import annotations

import asyncio

import pytest
from helpers.rollouts import request, run

from instep.errors import ConfigError, GenerationError
from instep.generation import PromptId
from instep.generation.exchange.ledger import ATTEMPTS, Ledger
from instep.generation.types import GenerationResult, PromptRequest, Split


def ask(name: str, split: Split = "train") -> PromptRequest:
    return request(id=PromptId(split, 0, name))


def result(asked: PromptRequest | None) -> GenerationResult:
    assert asked is not None
    return GenerationResult(request=asked, samples=[])


def names(found: list[PromptRequest | None]) -> list[str]:
    return [asked.id.prompt for asked in found if asked]


def test_prompts_come_back_as_results_by_their_split() -> None:
    async def story() -> None:
        ledger = Ledger()
        await ledger.put(ask("a"))
        await ledger.put(ask("b", "eval"))
        for _ in range(2):
            await ledger.hand_over(result(await ledger.take("one")))
        assert (await ledger.get("train")).request.id.prompt == "a"  # type: ignore[union-attr]
        assert (await ledger.get("eval")).request.id.prompt == "b"  # type: ignore[union-attr]
        assert await ledger.get("train", 0) is None
        assert await ledger.take("one", 0) is None

    run(story())


def test_the_prompts_of_a_dead_taker_go_to_the_next_one_first_and_once() -> None:
    async def story() -> None:
        ledger = Ledger()
        for name in "abcd":
            await ledger.put(ask(name))
        taken = [await ledger.take("dead"), await ledger.take("alive"), await ledger.take("dead")]
        await ledger.hand_over(result(taken[0]))
        assert [id.prompt for id in await ledger.lost("dead")] == ["c"]
        assert await ledger.lost("dead") == []
        assert names([await ledger.take("new"), await ledger.take("new")]) == ["c", "d"]
        sizes = await ledger.sizes()
        assert (sizes.waiting, sizes.taken, sizes.results, sizes.reissued) == (0, 3, 1, 1)

    run(story())


@pytest.mark.parametrize("taken_again", [True, False])
def test_a_result_that_was_made_twice_comes_out_once(taken_again: bool) -> None:
    """A taker that was thought dead hands over, before or after its prompt was given to another."""

    async def story() -> None:
        ledger = Ledger()
        await ledger.put(ask("a"))
        first = await ledger.take("slow")
        await ledger.lost("slow")
        second = await ledger.take("new") if taken_again else None
        assert await ledger.hand_over(result(first))
        if second:
            assert await ledger.hand_over(result(second))
        assert await ledger.get("train", 0) is not None
        assert await ledger.get("train", 0) is None
        assert await ledger.take("new", 0) is None

    run(story())


def test_a_prompt_that_kills_every_actor_ends_the_run_once_the_results_are_read() -> None:
    async def story() -> None:
        ledger = Ledger()
        for name in ("good", "bad"):
            await ledger.put(ask(name))
        await ledger.hand_over(result(await ledger.take("zero")))
        for number in range(ATTEMPTS):
            assert names([await ledger.take(str(number))]) == ["bad"]
            await ledger.lost(str(number))
        assert await ledger.take("last", 0) is None
        assert await ledger.get("train") is not None
        with pytest.raises(GenerationError, match=f"train/0/bad was with {ATTEMPTS} actors"):
            await ledger.get("train")

    run(story())


def test_full_queues_wait_for_room() -> None:
    async def story() -> None:
        ledger = Ledger(max_prompts=1, max_results=1)
        assert await ledger.put(ask("a"))
        assert not await ledger.put(ask("b"), 0)
        putting = asyncio.ensure_future(ledger.put(ask("b")))
        first = await ledger.take("one")
        assert await putting
        assert await ledger.hand_over(result(first))
        second = await ledger.take("one")
        assert not await ledger.hand_over(result(second), 0.01)
        assert (await ledger.sizes()).taken == 1
        handing = asyncio.ensure_future(ledger.hand_over(result(second)))
        assert await ledger.get("train")
        assert await handing
        assert await ledger.get("train")

    run(story())


def test_the_same_prompt_twice_is_refused_while_it_is_on_its_way() -> None:
    async def story() -> None:
        ledger = Ledger()
        await ledger.put(ask("a"))
        with pytest.raises(ConfigError, match="on its way"):
            await ledger.put(ask("a"))
        await ledger.hand_over(result(await ledger.take("one")))
        assert await ledger.put(ask("a"))

    run(story())
