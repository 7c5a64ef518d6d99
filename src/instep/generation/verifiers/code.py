"""Answers that are programs, run against tests in a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import Sequence
from typing import Any

from instep.generation.sandbox import Run, SandboxLimits, run_python
from instep.generation.verifiers.base import Answer


class CodeTests:
    """Runs the last Python block of an answer against tests, in a sandbox; the score is the part that passes.

    The label is a list: of statements such as `assert f(1) == 2`, which are run one after the other behind the answer's code; or of
    `{"input": …, "output": …}`, what the program reads and what it must print.

    threshold: a smaller part than this scores 0. at_once: programs that run at the same time.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, threshold: float = 1.0, at_once: int | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self.threshold = threshold
        self.places = asyncio.Semaphore(at_once or os.cpu_count() or 1)

    async def __call__(self, answer: Answer, value: Sequence[str] | Sequence[dict[str, str]]) -> float:
        if not value:
            raise ValueError("the label holds no tests")
        program = code_block(answer.text)
        if all(isinstance(test, str) for test in value):
            passed = await self._assertions(program, value)
        else:
            passed = sum([await self._prints(program, test) for test in value if isinstance(test, dict)])
        part = passed / len(value)
        return part if part >= self.threshold else 0.0

    async def _assertions(self, program: str, tests: Sequence[Any]) -> int:
        # The mark goes in by stdin: a program cannot print it without looking for it in the memory of the one that runs it.
        mark = secrets.token_hex(8)
        job = json.dumps({"mark": mark, "program": program, "tests": list(tests)})
        return (await self._run(HARNESS, job)).output.count(mark)

    async def _prints(self, program: str, test: dict[str, str]) -> bool:
        run = await self._run(program, test["input"])
        return run.ok and run.output.split() == test["output"].split()

    async def _run(self, program: str, stdin: str) -> Run:
        async with self.places:
            run = await run_python(program, self.limits, stdin)
        if run.end == "lost":
            raise RuntimeError("the sandbox could not run the program")
        return run


HARNESS = """
import json, os, sys
job = json.loads(sys.stdin.read())
out = os.dup(1)
space = {"__name__": "solution"}
exec(compile(job["program"], "solution.py", "exec"), space)
for test in job["tests"]:
    try:
        exec(compile(test, "test", "exec"), space)
    except BaseException:
        continue
    os.write(out, job["mark"].encode() + b"\\n")
os._exit(0)
"""


def code_block(text: str) -> str:
    """The last fenced block of a text, else the whole text."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else text
