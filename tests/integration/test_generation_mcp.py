"""The tools of a real MCP server, in this process."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.rollouts import run

from instep.generation import ToolSet
from instep.generation.tools.mcp import mcp_tools
from instep.generation.types import ToolCall, ToolRecord

mcp = pytest.importorskip("mcp")
if not hasattr(mcp, "Client"):
    pytest.skip("the tools of MCP servers need mcp 2", allow_module_level=True)


def server() -> Any:
    from mcp.server.mcpserver import MCPServer

    made = MCPServer("calculator")

    @made.tool()
    def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    @made.tool()
    def fail() -> str:
        raise ValueError("no such city")

    return made


def calls(*calls: ToolCall) -> list[ToolRecord]:
    async def main() -> list[ToolRecord]:
        async with mcp.Client(server()) as client:
            tools = await ToolSet.connect(await mcp_tools(client))
            assert [tool.name for tool in tools.definitions] == ["add", "fail"]
            assert tools.definitions[0].description == "Adds."
            return [await tools.call(call, within=10.0) for call in calls]

    return run(main())


def test_a_servers_tools_are_found_and_called_and_their_errors_are_told() -> None:
    added, wrong, failed = calls(ToolCall("add", {"a": "1", "b": 2}), ToolCall("add", {"a": 1}), ToolCall("fail"))
    assert (added.output, added.outcome) == ("3", "ok")
    assert (wrong.outcome, "'b' is a required property" in str(wrong.error)) == ("malformed", True)
    assert (failed.outcome, "Error executing tool fail" in str(failed.error)) == ("error", True)
