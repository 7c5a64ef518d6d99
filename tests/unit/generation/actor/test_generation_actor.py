"""An actor: prompts in, scored samples out, errors where they are seen. Its engine is in memory; everything else is real."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.rollouts import Say, decode
from helpers.serving import SOON, FakeServing, Fleet, wait

from instep.errors import ConfigError, EngineLost, EngineTimeout, GenerationError
from instep.generation import ExactMatch, Label, Limits, PromptId, PromptRequest, RewardConfig, TaggedParser
from instep.generation.actor.actor import LLMActor
from instep.generation.actor.manager import ActorManager

LONG = "a" * 400


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.stop()


def test_prompts_of_a_queue_come_back_with_n_samples_rewards_and_versions(fleet: Fleet) -> None:
    serving = FakeServing("right<|end|>")
    rewards = RewardConfig(verifiers={"match": ExactMatch()})
    for index in range(7):
        fleet.prompts.put(fleet.ask(str(index), n=3, seed=5, labels=(Label("match", "right" if index % 2 else "wrong"),)))
    fleet.prompts.put(fleet.ask("0", "eval", labels=(Label("match", "right"),)))
    fleet.actor(serving, reward_config=rewards)
    results = {result.request.id.prompt: result for result in (fleet.results.get(timeout=SOON) for _ in range(7))}
    assert sorted(results) == [str(index) for index in range(7)]
    for name, result in results.items():
        assert [sample.id.sample for sample in result.samples] == [0, 1, 2]
        assert {decode(sample.token_ids) for sample in result.samples} == {"right<|end|>"}
        assert {sample.reward.score for sample in result.samples if sample.reward} == {10.0 if int(name) % 2 else 0.0}
        assert [(span.version, span.start, span.end) for span in result.samples[0].versions] == [("default", 0, 6)]
    assert fleet.evals.get(timeout=SOON).request.id.split == "eval"
    assert fleet.results.empty()
    assert {asked[2]["seed"] for asked in serving.asked if asked[0].startswith("train/0/1/")} == {5, 6, 7}


def test_no_more_samples_are_in_the_engine_than_its_cache_holds(fleet: Fleet) -> None:
    serving = FakeServing(LONG, places=4)
    actor = fleet.actor(serving)
    assert actor.status().places == 4
    for index in range(6):
        fleet.prompts.put(fleet.ask(str(index), n=3))
    fleet.prompts.put(fleet.ask("more than there are places", n=9))
    for _ in range(7):
        fleet.results.get(timeout=SOON)
    assert serving.most == 9
    assert max(sum(asked[0].startswith(f"train/0/{index}/") for asked in serving.asked) for index in range(6)) == 3


def test_a_full_results_queue_stops_prompts_and_not_the_engine(fleet: Fleet) -> None:
    serving = FakeServing("hi", places=2)
    fleet.results.maxsize = 1
    for index in range(40):
        fleet.prompts.put(fleet.ask(str(index)))
    actor = fleet.actor(serving)
    wait(lambda: actor.status().answered >= 5)
    time.sleep(0.3)
    assert 5 <= actor.status().answered <= 6  # one in the queue, four that wait for it, one in hand
    assert actor.submit(fleet.ask("by a call")).result(SOON).samples[0].finish_reason == "stop"
    fleet.prompts.put(fleet.ask("e", "eval"))
    names = [fleet.results.get(timeout=SOON).request.id.prompt for _ in range(40)]
    assert sorted(names) == sorted(str(index) for index in range(40))
    assert fleet.evals.get(timeout=SOON)


def test_queues_that_are_false_while_empty_and_have_methods_for_asyncio_are_used(fleet: Fleet) -> None:
    class RayLike:
        """As `ray.util.queue.Queue`."""

        def __init__(self) -> None:
            self.items: queue.Queue[Any] = queue.Queue()

        def __len__(self) -> int:
            return self.items.qsize()

        async def get_async(self, block: bool, timeout: float) -> Any:  # noqa: ASYNC109
            await asyncio.sleep(0.01)
            return self.items.get(block=False)

        async def put_async(self, item: Any, block: bool, timeout: float) -> None:  # noqa: ASYNC109
            self.items.put(item)

    prompts, results = RayLike(), RayLike()
    fleet.actor(FakeServing(), prompt_queue=prompts, results_queue=results)
    prompts.items.put(fleet.ask("a"))
    assert results.items.get(timeout=SOON).request.id.prompt == "a"


def test_tools_are_called_and_a_broken_verifier_costs_its_sample_alone(fleet: Fleet) -> None:
    async def breaks(answer: Any, value: Any) -> float:
        raise ValueError("no verdict")

    def says(token_ids: list[int]) -> str:
        return "done<|end|>" if "said x" in decode(token_ids) else "<say>x</say>"

    rewards = RewardConfig(verifiers={"breaks": breaks, "match": ExactMatch()})
    actor = fleet.actor(FakeServing(says), tools=[Say()], tool_parser=TaggedParser, reward_config=rewards)
    broken = actor.submit(fleet.ask("a", labels=(Label("breaks", 1),))).result(SOON)
    whole = actor.submit(fleet.ask("b", labels=(Label("match", "xdone"),))).result(SOON)
    assert "no verdict" in str(broken.samples[0].reward and broken.samples[0].reward.error)
    assert [record.outcome for record in whole.samples[0].tools] == ["ok"]
    assert whole.samples[0].turns == 2
    actor.check_background_threads()


@pytest.mark.parametrize("how", ["tool", "verifier", "twice"])
def test_a_prompt_that_cannot_be_answered_is_refused_to_its_caller_and_answered_with_its_error_in_a_queue(fleet: Fleet, how: str) -> None:
    serving = FakeServing("hi", hold=1)
    actor = fleet.actor(serving, reward_config=RewardConfig())
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "tool": ({"tools": ("saw",)}, "no tool saw"),
        "verifier": ({"labels": (Label("nobody", 1),)}, "no verifier nobody"),
        "twice": ({}, "under way already"),
    }
    wrong, why = cases[how]
    if how == "twice":
        actor.submit(fleet.ask("a"))
    with pytest.raises(ConfigError, match=why):
        actor.submit(fleet.ask("a", **wrong)).result(SOON)
    fleet.prompts.put(fleet.ask("a", n=2, **wrong))
    refused = fleet.results.get(timeout=SOON)
    assert refused.request == fleet.ask("a", n=2, **wrong)
    assert [(sample.finish_reason, sample.token_ids) for sample in refused.samples] == [("error", [])] * 2
    assert why in refused.samples[0].error
    assert refused.samples[0].reward.error == refused.samples[0].error
    serving.release()
    fleet.prompts.put(fleet.ask("b"))
    assert fleet.results.get(timeout=SOON).samples[0].finish_reason == "stop"
    actor.check_background_threads()
    assert actor.status().errors == 1


def test_a_prompt_that_the_engine_does_not_take_is_answered_with_its_error(fleet: Fleet) -> None:
    def says(token_ids: list[int]) -> str:
        if token_ids[0] == 7:
            raise ConfigError("token 7 is out of vocabulary")
        return "hi<|end|>"

    actor = fleet.actor(FakeServing(says))
    fleet.prompts.put(PromptRequest(id=PromptId("eval", 0, "a"), prompt_token_ids=[7]))
    assert "out of vocabulary" in fleet.evals.get(timeout=SOON).samples[0].error
    fleet.prompts.put(fleet.ask("b"))
    assert fleet.results.get(timeout=SOON).samples[0].finish_reason == "stop"
    actor.check_background_threads()


def test_results_of_prompts_that_were_refused_wait_for_room_and_are_not_lost(fleet: Fleet) -> None:
    fleet.results.maxsize = 1
    actor = fleet.actor(FakeServing("hi"))
    for index in range(3):
        fleet.prompts.put(fleet.ask(str(index), tools=("saw",)))
    wait(lambda: actor.status().errors == 3)
    left = actor.stop(drain=False)
    handed = fleet.results.get(timeout=SOON).request
    assert sorted(request.id.prompt for request in [handed, *left]) == ["0", "1", "2"]


@pytest.mark.parametrize("busy", [True, False])
def test_an_engine_that_dies_ends_the_actor_and_gives_its_prompts_back(fleet: Fleet, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.generation.actor.work.BEAT", 0.01)
    serving, manager = FakeServing(hold=1), ActorManager()
    actor = fleet.actor(serving, actor_manager=manager)
    future = actor.submit(fleet.ask("called")) if busy else None
    if busy:
        fleet.prompts.put(fleet.ask("queued", n=2))
        wait(lambda: len(serving.running) == 3)
    serving.dead = RuntimeError("killed")
    wait(lambda: actor.status().failure)
    if future is not None:
        with pytest.raises((EngineLost, GenerationError), match="killed"):
            future.result(SOON)
    for call in (actor.ready, actor.check_background_threads, lambda: actor.submit(fleet.ask("b"))):
        with pytest.raises(GenerationError, match="killed") as raised:
            call()
        assert isinstance(raised.value.__cause__, EngineLost)
    wait(lambda: any(one["failure"] for one in manager.status()["actors"].values()))
    with pytest.raises(GenerationError, match="actor: EngineLost"):
        manager.check()
    assert [request.id.prompt for request in actor.stop()] == (["queued"] if busy else [])


def test_a_cancelled_prompt_keeps_what_it_has_and_a_cancelled_call_leaves_nothing(fleet: Fleet) -> None:
    serving = FakeServing(LONG, hold=3)
    actor = fleet.actor(serving)
    request = fleet.ask("kept", n=2)
    fleet.prompts.put(request)
    call = actor.submit(fleet.ask("dropped"))
    wait(lambda: len(serving.running) == 3)
    assert call.cancel()
    wait(lambda: len(serving.running) == 2)
    assert actor.cancel(request.id)
    kept = fleet.results.get(timeout=SOON)
    assert [(sample.finish_reason, len(sample.token_ids)) for sample in kept.samples] == [("abort", 3)] * 2
    wait(lambda: not actor.cancel(request.id))
    assert actor.status().prompts == actor.status().samples == 0


def test_stopping_hands_over_what_is_under_way_and_says_what_is_not(fleet: Fleet) -> None:
    serving = FakeServing(hold=1, places=2)
    actor = fleet.actor(serving)
    for index in range(6):
        fleet.prompts.put(fleet.ask(str(index)))
    wait(lambda: len(serving.running) == 2)
    left = actor.stop(drain=True, timeout=0.3)  # its engine does not move
    taken = {request.id.prompt for request in left}
    assert len(left) == 6 - fleet.prompts.qsize() >= 2
    assert fleet.results.empty()
    assert serving.closed
    assert actor.stop() == []
    with pytest.raises(GenerationError, match="is closed"):
        actor.submit(fleet.ask("late"))
    second = fleet.actor(FakeServing())
    for request in left:
        fleet.prompts.put(request)
    names = {fleet.results.get(timeout=SOON).request.id.prompt for _ in range(6)}
    assert taken < names == {str(index) for index in range(6)}
    assert second.stop() == []


def test_a_draining_stop_loses_nothing(fleet: Fleet) -> None:
    serving = FakeServing(LONG, hold=2)
    actor = fleet.actor(serving)
    for index in range(3):
        fleet.prompts.put(fleet.ask(str(index)))
    wait(lambda: len(serving.running) == 3)
    serving.release()
    assert actor.stop() == []
    assert fleet.results.qsize() == 3


def test_a_paused_fleet_takes_no_prompt_until_it_is_resumed_or_its_time_is_over(fleet: Fleet) -> None:
    manager = ActorManager()
    manager.pause(60)
    actor = fleet.actor(FakeServing(), actor_manager=manager)
    fleet.prompts.put(fleet.ask("a"))
    time.sleep(0.4)
    assert (fleet.prompts.qsize(), actor.status().prompts) == (1, 0)
    manager.resume()
    fleet.results.get(timeout=SOON)
    manager.pause(0.3)
    time.sleep(0.2)
    fleet.prompts.put(fleet.ask("b"))
    fleet.results.get(timeout=SOON)
    with pytest.raises(ConfigError):
        manager.pause(float("inf"))


def test_what_goes_wrong_at_the_start_is_raised_there() -> None:
    async def broken() -> Any:
        raise RuntimeError("no GPU")

    async def slow() -> Any:
        await asyncio.sleep(3600)

    with pytest.raises(RuntimeError, match="no GPU"):
        LLMActor(broken)
    with pytest.raises(EngineTimeout, match="did not start within"):
        LLMActor(slow, start_timeout=0.05)
    serving = FakeServing()
    with pytest.raises(ConfigError, match="context 4000"):
        LLMActor(serving.begin, limits=Limits(max_model_len=5000))
    assert serving.closed
    with pytest.raises(ConfigError, match="results_queue"):
        LLMActor(serving.begin, prompt_queue=Fleet().prompts)
