"""A tool that runs the Python programs that a model writes."""

from __future__ import annotations

import asyncio
import os

from instep.generation.sandbox import Run, SandboxLimits, require, run_python
from instep.generation.tools.toolset import ToolDefinition, ToolOutput


class PythonTool:
    """Runs each program in a sandbox of its own (see `sandbox`). What it prints is the output; how
    it failed is the error.

    at_once: programs that run at the same time. More wait: their seconds count from when they
        start, but the limit on a tool call does not stop meanwhile.

    An actor refuses the tool with a `ConfigError` where its machine gives a weaker sandbox than
    `limits.sandbox`.
    """

    def __init__(self, name: str = "python", limits: SandboxLimits | None = None, at_once: int | None = None) -> None:
        self.name = name
        self.limits = limits or SandboxLimits()
        self.places = asyncio.Semaphore(at_once or os.cpu_count() or 1)

    def describe(self) -> ToolDefinition:
        require(self.limits.sandbox)
        code = {"type": "string", "description": "A complete program. Only what it prints is seen."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        return ToolDefinition(self.name, "Runs a Python program and shows what it prints.", parameters)

    async def execute(self, code: str) -> ToolOutput:
        async with self.places:
            run = await run_python(code, self.limits)
        text = "" if run.end == "lost" else run.output
        return ToolOutput(text=text, error=failure(run, self.limits), info={"seconds": run.seconds})


def failure(run: Run, limits: SandboxLimits) -> str | None:
    """Says in a sentence why a program failed, or returns None."""
    if run.ok:
        return None
    return {
        "exit": f"the program ended with exit code {run.code}",
        "signal": f"the program was ended by signal {run.code}",
        "timeout": f"the program was stopped after {limits.seconds:g} seconds",
        "output": f"the program was stopped after it had printed {limits.output} bytes",
        "disk": f"the program was stopped after it had written {limits.disk} bytes",
        "lost": f"the program could not be run: {run.output}",
    }[run.end]
