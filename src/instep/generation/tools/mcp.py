"""The tools of an MCP server."""

from __future__ import annotations

from typing import Any

from instep.generation.tools.toolset import ToolDefinition, ToolOutput


class McpTool:
    """One tool of a server, called through a client. The client must stay open as long as the
    tool is used."""

    def __init__(self, client: Any, definition: ToolDefinition) -> None:
        self.client = client
        self.definition = definition

    def describe(self) -> ToolDefinition:
        return self.definition

    async def execute(self, **arguments: Any) -> ToolOutput:
        answer = await self.client.call_tool(self.definition.name, arguments)
        text = "\n".join(part.text for part in answer.content if part.type == "text")
        return ToolOutput(error=text or "the tool failed") if answer.is_error else ToolOutput(text=text)


async def mcp_tools(client: Any) -> list[McpTool]:
    """Returns every tool of the server that `client` is connected to, an `mcp.Client` of mcp 2
    inside its `async with`.

    What a tool answers beside text is left out.
    """
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [McpTool(client, ToolDefinition(tool.name, tool.description or "", tool.input_schema)) for tool in page.tools]
        cursor = page.next_cursor
        if not cursor:
            return tools
