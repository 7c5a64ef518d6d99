"""Tools, how models write calls of them, and what is told of a call."""

from instep.generation.tools.toolset import Environment, Tool, ToolDefinition, ToolOutput, ToolSet

__all__ = ["Environment", "Tool", "ToolDefinition", "ToolOutput", "ToolSet"]
