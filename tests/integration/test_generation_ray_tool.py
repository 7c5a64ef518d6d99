"""A tool that is a real Ray actor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.rollouts import run, until

import instep
from instep.generation import ToolDefinition, ToolOutput, ToolSet
from instep.generation.types import ToolCall, ToolRecord

ray = pytest.importorskip("ray")


class Remote:
    """Answers, raises, hangs or dies, as it is told; writes down that it was cancelled."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)

    def describe(self) -> ToolDefinition:
        return ToolDefinition("remote", "", {"type": "object", "properties": {"do": {"type": "string"}, "times": {"type": "integer"}}})

    async def execute(self, do: str, times: int = 1) -> ToolOutput | str:
        if do == "raise":
            raise ValueError("not a city")
        if do == "die":
            os._exit(1)
        if do == "hang":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.log.write_text("cancelled")
                raise
        return ToolOutput(text=do * times, reward=1.0)


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("ray")
    here = Path(__file__).parent  # the actor's process finds this module there, and the package beside it
    paths = os.pathsep.join(map(str, (here, here.parent, Path(instep.__file__).parents[1])))
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}}, logging_level="ERROR")
    yield ray.remote(num_cpus=0)(Remote).remote(str(folder / "log")), folder / "log"
    ray.shutdown()


def call(handle: Any, *, within: float = 30.0, **arguments: Any) -> ToolRecord:
    async def main() -> ToolRecord:
        tools = await ToolSet.connect([handle])
        return await tools.call(ToolCall("remote", arguments), within=within)

    return asyncio.run(asyncio.wait_for(main(), 60.0))


def test_an_actor_answers_raises_is_cancelled_in_time_and_may_die(handle: Any) -> None:
    actor, log = handle
    answered = call(actor, do="ab", times="2")
    assert (answered.output, answered.reward, answered.outcome) == ("abab", 1.0, "ok")
    assert call(actor, do="raise").error == "ValueError: not a city"
    assert call(actor, do="hang", within=0.5).outcome == "timeout"
    run(until(log.exists))
    assert call(actor, do="still there").output == "still there"
    died = call(actor, do="die")
    assert (died.outcome, "died" in str(died.error).lower()) == ("error", True)
