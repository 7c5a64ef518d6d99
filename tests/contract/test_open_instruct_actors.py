"""Open Instruct's actors on a real Ray: its tools are Ray actors that are called. The engine is in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.ray_fleet import SOON, environment
from helpers.rollouts import decode, encode
from helpers.serving import FakeServing

from instep.dropin.open_instruct import LLMRayActor, PromptRequest, SamplingConfig
from instep.errors import ConfigError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")


@dataclass
class ToolOutput:
    """As Open Instruct's tools answer."""

    output: str
    called: bool
    error: str
    timeout: bool
    runtime: float


class Search:
    """A tool as Open Instruct makes them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def get_call_name(self) -> str:
        return "search"

    def get_openai_tool_definitions(self) -> list[dict[str, Any]]:
        schema = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
        return [{"type": "function", "function": {"name": "search", "description": "Finds.", "parameters": schema}}]

    def get_stop_strings(self) -> list[str]:
        return ["</call>"]

    async def safe_execute(self, **arguments: Any) -> ToolOutput:
        self.asked.append(arguments)
        return ToolOutput(f"found {arguments['query']}", True, "", False, 0.1)

    def queries(self) -> list[dict[str, Any]]:
        return self.asked


async def fake(says: Any) -> FakeServing:
    return await FakeServing(says).begin()


def searches(call: str, token_ids: list[int]) -> str:
    return "done<|end|>" if "found" in decode(token_ids) else call


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    variables = environment()
    variables["env_vars"]["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)  # its processes import the tool from here
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=variables, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("parser", "call", "query"),
    [("legacy", "<search>x</search>", "x"), ("dr_tulu", "say x</call>", "say x</call>")],
    ids=["legacy", "dr_tulu"],
)
def test_tools_are_called_through_the_actor_as_a_plain_ray_class(cluster: None, parser: str, call: str, query: str) -> None:
    tool = ray.remote(num_cpus=0)(Search).remote()
    actor = ray.remote(num_cpus=0)(LLMRayActor).remote(
        partial(fake, partial(searches, call)), tool_actors=[tool], tool_parser_type=parser, max_tool_calls=2, mask_tool_use=False,
        bundle_indices=[0], prompt_queue=None, results_queue=None, eval_results_queue=None, actor_manager=None, inflight_updates=False,
    )  # fmt: skip
    try:
        prompt = PromptRequest(encode("say"), SamplingConfig(n=1, max_tokens=500), 0, "a")
        result = ray.get(actor.generate.remote(prompt), timeout=SOON)
        assert ray.get(tool.queries.remote(), timeout=SOON) == [{"query": query}]
        assert result.request_info.tool_outputs == [f"found {query}"]
        assert (result.request_info.num_calls, result.request_info.tool_calleds, result.request_info.timeouts) == ([1], [True], [0])
        assert set(result.masks[0]) == {1}
        assert decode(result.responses[0]).endswith("done<|end|>")
        assert isinstance(ray.get(actor.get_kv_cache_info.remote(), timeout=SOON), int)
    finally:
        ray.kill(actor)


def test_a_tool_that_is_no_tool_is_named_before_an_engine_starts(cluster: None) -> None:
    from instep.generation.ray.arguments import actor_options

    tools = [ray.remote(num_cpus=0)(Search).remote() for _ in range(2)]
    with pytest.raises(ConfigError, match="goes with one tool, and there are 2"):
        actor_options(tool_actors=tools, tool_parser_type="dr_tulu")
    assert [tool.definition.name for tool in actor_options(tool_actors=tools[:1])["tools"]] == ["search"]
