"""Tools, and parsers that read a model's calls of them and show the results."""

from instep.generation.tools.toolset import Environment, Tool, ToolDefinition, ToolOutput, ToolSet

__all__ = ["Environment", "Tool", "ToolDefinition", "ToolOutput", "ToolSet"]
