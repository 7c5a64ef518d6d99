"""Finds the program in an answer, and judges it by tests in a sandbox."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import textwrap
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from instep.generation.sandbox import Run, SandboxLimits, run_python
from instep.generation.verifiers.base import Answer, reading
from instep.generation.waiting import Turnstile

FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^`\r\n]*+)")
"""Possessive (`*+`): nothing is tried twice, so time is linear in the line."""
PYTHON = ("python", "py", "python3", "py3")
LIMITS = SandboxLimits(output=1 << 20)
ROOM = 4
"""A program may print that many times what a test expects; what is longer is wrong anyway."""


class CodeTests:
    """Runs the last Python block of an answer against tests, in a sandbox; the score is the part
    that passes.

    The label is a list. A test is `{"input": …, "output": …}`, what the program reads and what it
    must print on stdout, white space apart; or statements such as `assert f(1) == 2`. These run one
    after the other in a process of their own, which asks the program for the values of its
    functions: the program has no part in the verdict. So an object of the program's own class
    equals no plain value there, and adds, subtracts and compares only with others of its kind.

    threshold: a smaller part than this scores 0, and no more tests are run once it cannot be
    reached. at_once: answers that a `RewardConfig` has judged at the same time. seconds: for all
    tests of one answer, from the start of its first program; those that are left then fail. Raises
    `ValueError` for a label that is no such list, `RuntimeError` where the sandbox runs no program
    at all.
    """

    def __init__(
        self, limits: SandboxLimits | None = None, *, threshold: float = 1.0, at_once: int | None = None, seconds: float = 30.0
    ) -> None:
        self.limits = limits or LIMITS
        self.threshold = threshold
        self.seconds = seconds
        self.turnstile = Turnstile(at_once or os.cpu_count() or 1)

    @property
    def own_seconds(self) -> float:
        return self.seconds

    async def __call__(self, answer: Answer, value: Sequence[str | dict[str, str]]) -> float:
        statements, exchanges = sorted_tests(value)
        program = await reading(code_block, answer.text)
        work = Work(self, most=len(value), needed=math.ceil(self.threshold * len(value) - 1e-9))
        if statements:
            await work.judge(program, statements)
        for test in exchanges:
            if work.open():
                await work.compare(program, test["input"], test["output"])
        part = work.passed / len(value)
        return part if part >= self.threshold else 0.0


class Work:
    """The tests of one answer: how many have passed and failed, and how much of their time is
    left."""

    def __init__(self, verifier: CodeTests, most: int, needed: int) -> None:
        self.verifier = verifier
        self.may_fail = most - needed
        self.passed = self.failed = 0
        self.left = verifier.seconds

    def open(self) -> bool:
        """Whether another test can change the score."""
        return self.failed <= self.may_fail and self.left > 0

    async def compare(self, program: str, given: str, expected: str) -> None:
        limits = self.limits(len(expected.encode()) * ROOM)
        run = await self.run(lambda: run_python(program, limits, given, prints="stdout"))
        self.count(int(run.ok and run.output.split() == expected.split()), 1)

    async def judge(self, program: str, tests: Sequence[str]) -> None:
        run = await self.run(lambda: judged(program, tests, self.limits(len(tests) * 16)))
        passed = {word for word in run.output.split() if word.isdecimal() and int(word) < len(tests)}
        self.count(len(passed), len(tests))

    def count(self, passed: int, of: int) -> None:
        self.passed += passed
        self.failed += of - passed

    def limits(self, output: int) -> SandboxLimits:
        limits = self.verifier.limits
        return replace(limits, seconds=min(limits.seconds, self.left), output=max(limits.output, output))

    async def run(self, start: Callable[[], Coroutine[Any, Any, Run]]) -> Run:
        """Returns a program's run. A program that is lost twice counts as failed, if another
        program can run."""
        began = time.monotonic()
        run = await start()
        if run.end == "lost":
            run = await start()
        self.left -= time.monotonic() - began
        if run.end == "lost" and not (other := await run_python("", SandboxLimits(sandbox=self.verifier.limits.sandbox))).ok:
            raise RuntimeError(f"the sandbox could not run the program: {other.output}")
        return run


async def judged(program: str, tests: Sequence[str], limits: SandboxLimits) -> Run:
    """Returns the judge's run, whose output lists the numbers of the tests that passed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        solution = asyncio.ensure_future(run_python(source("solve"), limits, json.dumps(program), prints="nothing", channel=theirs))
        judge = asyncio.ensure_future(run_python(source("judge"), limits, json.dumps(list(tests)), prints="stdout", channel=ours))
        try:
            return await judge
        finally:
            judge.cancel()
            solution.cancel()
            await asyncio.gather(judge, solution, return_exceptions=True)


@cache
def source(main: str) -> str:
    """Returns the text of the judge's or the solution's program."""
    parts = (Path(__file__).with_name(name).read_text() for name in ("code_values.py", "code_peer.py", "code_remote.py"))
    return "\n".join((*parts, f"{main}()\n"))


def sorted_tests(value: Sequence[Any]) -> tuple[list[str], list[dict[str, str]]]:
    """Returns a label's statements, and its pairs of input and output. Raises `ValueError` for
    any other test."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError("the label holds no tests")
    statements = [test for test in value if isinstance(test, str)]
    exchanges = [test for test in value if isinstance(test, dict) and all(isinstance(test.get(key), str) for key in ("input", "output"))]
    if len(statements) + len(exchanges) < len(value):
        raise ValueError("the label holds a test that is neither a text nor texts for input and output")
    return statements, exchanges


def code_block(text: str) -> str:
    """Returns the last fenced block in Python, else the last one without a language, else the
    whole text.

    A block that is not closed goes on to the end.
    """
    named: str | None = None
    unnamed: str | None = None
    for language, block in _blocks(text.replace("\r\n", "\n")):
        if language in PYTHON:
            named = block
        elif not language:
            unnamed = block
    found = named if named is not None else unnamed
    return text if found is None else found


def _blocks(text: str) -> list[tuple[str, str]]:
    """Returns the language and the text of each block."""
    found = []
    lines = iter(text.split("\n"))
    for line in lines:
        opened = FENCE.fullmatch(line)
        if opened is None:
            continue
        fence = opened[1]
        words = opened[2].lower().replace("{", " ").replace("}", " ").replace(",", " ").split()
        inside: list[str] = []
        for inner in lines:
            if inner.strip().startswith(fence) and not inner.strip().strip(fence[0]):
                block = "".join(f"{one}\n" for one in inside)
                break
            inside.append(inner)
        else:  # cut off, or closed at the end of a line of code
            block = "\n".join(inside).partition(fence)[0]
        found.append((words[0].lstrip(".") if words else "", textwrap.dedent(block) if line[:1].isspace() else block))
    return found
