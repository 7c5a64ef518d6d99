"""Rollouts that end early: aborted, out of time, cancelled; and environments, which are closed in every case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from helpers.rollouts import HANG, Room, Say, ScriptedClient, decode, harness, request, run, said, until

from instep.errors import GenerationError
from instep.generation import Harness, RequestId, Sample, answer
from instep.generation.rollout.turns import rollout


def until_aborted(client: ScriptedClient, with_: Harness, ready: Callable[[], Any], **settings: Any) -> Sample:
    """The sample of a rollout that is aborted when `ready` says so."""

    async def main() -> Sample:
        aborted = asyncio.Event()
        task = asyncio.ensure_future(rollout(request(**settings), 0, client, with_, aborted))
        await until(ready)
        aborted.set()
        return await task

    return run(main())


def hangs(*_: Any) -> Coroutine[Any, Any, str]:
    return asyncio.sleep(3600, "never")


def test_an_aborted_turn_keeps_the_tokens_that_were_sampled_and_their_versions() -> None:
    client = ScriptedClient(said("<say>x</say>"), HANG, aborted=said("half", "abort", [("v1", 0, 3), ("v2", 3, 4)]))
    sample = until_aborted(client, harness(Say()), lambda: client.hanging)
    assert decode(sample.token_ids).endswith("half")
    assert [span.version for span in sample.versions] == ["v1", "v1", "v2"]
    assert (sample.finish_reason, sample.turns, sample.error) == ("abort", 2, None)
    assert client.aborts == [sample.id]


def test_a_turn_aborted_before_its_first_token_is_an_empty_turn() -> None:
    client = ScriptedClient(HANG)
    sample = until_aborted(client, harness(), lambda: client.hanging)
    assert (sample.token_ids, sample.versions, sample.finish_reason) == ([], [], "abort")


def test_an_abort_during_a_tool_call_ends_the_sample_with_the_call_in_its_record() -> None:
    say = Say(hangs)
    client = ScriptedClient(said("<say>x</say><say>y</say>"))
    sample = until_aborted(client, harness(say), lambda: say.calls)
    assert [(record.outcome, record.arguments) for record in sample.tools] == [("abort", {"text": "x"}), ("abort", {"text": "y"})]
    assert (sample.finish_reason, len(say.calls), decode(sample.token_ids)) == ("abort", 1, "<say>x</say><say>y</say>")


def test_an_aborted_sample_asks_nothing_more_of_the_engine() -> None:
    async def main() -> Sample:
        aborted = asyncio.Event()
        aborted.set()
        return await rollout(request(), 0, client, machine, aborted)

    client, machine = ScriptedClient(said("never")), harness()
    sample = run(main())
    assert (client.asked, sample.finish_reason, sample.turns) == ([], "abort", 0)


def test_an_engine_that_does_not_answer_an_abort_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(ScriptedClient):
        async def abort(self, id: RequestId) -> None:
            await asyncio.sleep(3600)

    monkeypatch.setattr("instep.generation.rollout.turns.GRACE", 0.01)
    client = Deaf(HANG)
    sample = until_aborted(client, harness(), lambda: client.hanging)
    assert (sample.finish_reason, client.cancelled) == ("abort", [sample.id])
    assert "did not hand over an aborted turn" in str(sample.error)


def test_a_sample_that_takes_too_long_is_aborted_and_says_so() -> None:
    client = ScriptedClient(HANG, aborted=said("half", "abort"))
    sample = run(rollout(request(), 0, client, harness(sample_timeout=0.02)))
    assert (decode(sample.token_ids), sample.finish_reason) == ("half", "abort")
    assert sample.error == "the sample took longer than 0.02 seconds"


def test_a_client_that_cancels_its_own_call_does_not_pass_for_a_cancelled_rollout() -> None:
    class Odd(ScriptedClient):
        async def complete(self, *_: Any) -> Any:
            raise asyncio.CancelledError

    with pytest.raises(GenerationError, match="sample train/0/p/0, turn 0: "):
        run(answer(request(), Odd(), harness()))


@pytest.mark.parametrize("where", ["engine", "tool"])
def test_cancelling_an_answer_cancels_what_it_waits_for_and_closes_environments(where: str) -> None:
    room, say = Room(), Say(hangs)
    client = ScriptedClient(said("<say>x</say>") if where == "tool" else HANG)
    machine = harness(room, say)

    async def main() -> None:
        before = asyncio.all_tasks()
        task = asyncio.ensure_future(answer(request(n=2), client, machine))
        await until(lambda: len(client.hanging if where == "engine" else say.calls) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: asyncio.all_tasks() <= before)  # nothing goes on in the background

    run(main())
    assert len(client.cancelled) == (2 if where == "engine" else 0)
    assert sorted(room.events) == ["close 0", "close 1", "open 0 {}", "open 1 {}"]


def test_every_sample_has_an_environment_of_its_own_which_rewards_and_ends_it() -> None:
    room = Room(steps=2)
    client = ScriptedClient(*[said("<room>go</room>")] * 3)
    result = run(answer(request(n=2, tool_config={"room": {"level": 3}}), client, harness(room)))
    for sample in result.samples:
        assert [(record.output, record.reward, record.done) for record in sample.tools] == [("step 1", 0.5, False), ("step 2", 1.0, True)]
        assert (sample.finish_reason, sample.turns) == ("done", 2)
        assert sample.mask[-1] == 1  # what ends a sample is not shown to the model
    assert sorted(room.events) == ["close 0", "close 1", "open 0 {'level': 3}", "open 1 {'level': 3}"]


def test_an_environment_is_closed_when_the_engine_fails() -> None:
    room = Room()
    with pytest.raises(RuntimeError, match="died"):
        run(answer(request(), ScriptedClient(RuntimeError("died")), harness(room)))
    assert room.events == ["open 0 {}", "close 0"]


class Closed(Room):
    @asynccontextmanager
    async def session(self, id: RequestId, config: dict[str, Any]) -> AsyncIterator[Say]:
        if config.get("hang"):
            await asyncio.sleep(3600)
        if config.get("full"):
            raise RuntimeError("no room is free")
        yield Say(name="room")
        raise RuntimeError("the door is stuck")


@pytest.mark.parametrize(("config", "words"), [({"full": True}, "RuntimeError: no room is free"), ({"hang": True}, "TimeoutError")])
def test_an_environment_that_does_not_open_ends_its_sample_with_an_error(config: dict[str, Any], words: str) -> None:
    client = ScriptedClient(said("never"))
    sample = run(rollout(request(tool_config={"room": config}), 0, client, harness(Closed(), tool_timeout=0.05)))
    assert (sample.finish_reason, client.asked) == ("error", [])
    assert f"an environment did not open: {words}" in str(sample.error)


@pytest.mark.parametrize("where", ["opening", "closing"])
def test_an_environment_that_ignores_being_cancelled_does_not_hold_the_sample(where: str) -> None:
    over = asyncio.Event()

    async def hang() -> None:
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    class Stuck(Room):
        @asynccontextmanager
        async def session(self, id: RequestId, config: dict[str, Any]) -> AsyncIterator[Say]:
            if where == "opening":
                await hang()
            yield Say(name="room")
            await hang()

    async def main() -> Sample:
        sample = await rollout(request(), 0, ScriptedClient(said("end")), made)
        over.set()
        return sample

    made = harness(Stuck(), tool_timeout=0.05)
    assert run(main()).finish_reason == ("error" if where == "opening" else "stop")


def test_an_environment_that_does_not_close_does_not_cost_the_sample(caplog: pytest.LogCaptureFixture) -> None:
    sample = run(rollout(request(), 0, ScriptedClient(said("<room>x</room>"), said("end")), harness(Closed())))
    assert decode(sample.token_ids).endswith("end")
    assert "an environment of sample train/0/p/0 did not close" in caplog.text
