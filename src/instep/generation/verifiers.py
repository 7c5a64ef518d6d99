"""Verifiers: what is an answer worth, given what the prompt's label says. Each gives a score, 1 for right and 0 for wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from instep.generation.sandbox import Run, SandboxLimits, run_python
from instep.generation.types import PromptRequest, Sample


@dataclass(frozen=True)
class Answer:
    """What a verifier looks at. `text` is what the model itself said, without special tokens: tool output cannot be taken for an answer."""

    text: str
    sample: Sample
    request: PromptRequest


class Verifier(Protocol):
    """Raising is breaking: the sample then has an error, not a score of 0 that nobody notices."""

    async def __call__(self, answer: Answer, value: Any, /) -> float:
        """The score of an answer. `value` is the label's."""


@dataclass(frozen=True)
class Format:
    """Whether the whole text matches a regular expression. By default: thoughts, then an answer, in R1's tags."""

    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"

    async def __call__(self, answer: Answer, value: Any = None) -> float:  # noqa: ARG002
        return float(re.fullmatch(self.pattern, answer.text, re.DOTALL) is not None)


@dataclass(frozen=True)
class ExactMatch:
    """Whether the final answer is one of the label's, apart from case, articles, punctuation and white space.

    The final answer is what stands in the last `<answer>` or `\\boxed{}`, else the whole text.
    """

    async def __call__(self, answer: Answer, value: str | Sequence[str]) -> float:
        accepted = [value] if isinstance(value, str) else list(value)
        return float(_plain(final(answer.text)) in {_plain(text) for text in accepted})


@dataclass(frozen=True)
class Numeric:
    """Whether the last number of the final answer is the label's, exactly or within `tolerance` of its size."""

    tolerance: float = 0.0

    async def __call__(self, answer: Answer, value: str | float) -> float:
        expected = last_number(str(value))
        if expected is None:
            raise ValueError(f"the label {value!r} holds no number")
        found = last_number(final(answer.text))
        return float(found is not None and abs(found - expected) <= abs(expected) * Fraction(self.tolerance))


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


def final(text: str) -> str:
    """What stands in the last `<answer>` or else in the last `\\boxed{}`; the whole text where there is neither."""
    start = text.rfind("<answer>")
    if start >= 0:
        text = text[start + len("<answer>") :].partition("</answer>")[0]
    boxed = text.rfind("\\boxed{")
    if boxed < 0:
        return text.strip()
    depth, start = 0, boxed + len("\\boxed")
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position].strip()
    return text[start + 1 :].strip()


NUMBER = re.compile(
    r"((?:(?<![\w)])-)?(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:e[+-]?\d{1,3}(?!\d))?)(?:\s*/\s*([1-9]\d*))?",
    re.IGNORECASE,
)
DIGITS = 100
"""What is longer is no answer, and slow to compute with."""


def last_number(text: str) -> Fraction | None:
    """The last number in a text: `1,234.5`, `-3/4`, `6e-3`."""
    found = NUMBER.findall(text)
    if not found or max(map(len, found[-1])) > DIGITS:
        return None
    number, divisor = found[-1]
    return Fraction(number.replace(",", "")) / Fraction(divisor or 1)


def code_block(text: str) -> str:
    """The last fenced block of a text, else the whole text."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else text


def _plain(text: str) -> str:
    words = text.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))
