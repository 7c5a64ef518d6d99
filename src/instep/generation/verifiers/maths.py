"""Judges mathematical answers with math-verify.

It parses and evaluates what a model wrote, which may take for ever or all memory: so it works in
processes of its own, under a deadline.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from asyncio import get_running_loop
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from instep.extras import missing
from instep.generation.verifiers.base import Answer
from instep.generation.verifiers.final import LONGEST, marked, normal
from instep.generation.verifiers.number import number
from instep.generation.waiting import Turnstile

WORKER = Path(__file__).with_name("maths_worker.py")
START = 60.0
"""Seconds in which a process must be ready."""


class Maths:
    """Whether an answer equals the label mathematically: `1/2`, `\\frac{1}{2}` and `0.5` are one
    answer. The label may be LaTeX.

    The answer is what stands in the last `<answer>` or `\\boxed{}`; where there is neither, what
    math-verify finds.

    seconds: for one comparison, from its start. An answer that cannot be compared in that time is
    wrong. memory: bytes for each process.
    processes: comparisons at the same time. They start when they are needed.
    """

    def __init__(self, *, seconds: float = 5.0, memory: int = 1 << 31, processes: int = 2) -> None:
        if find_spec("math_verify") is None:
            raise missing("Maths", "math_verify")
        self.seconds = seconds
        self.memory = memory
        self.processes = processes
        self.turnstile = Turnstile(processes)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="instep-maths")
        self._mine = threading.local()

    @property
    def own_seconds(self) -> float:
        return self.seconds

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the settings alone: the processes stay here."""
        return _made, (self.seconds, self.memory, self.processes)

    async def __call__(self, answer: Answer, value: str | float) -> float:
        return await self.compare(str(value), answer.text)

    async def compare(self, label: str, text: str, tolerance: float = 0.0) -> float:
        """Returns 1 if the answer in `text` equals the label, or differs by at most `tolerance`
        of its size; else 0.

        Raises `ValueError` for a label that is no mathematics.
        """
        return await get_running_loop().run_in_executor(self._threads, self._compare, label, text, tolerance)

    def _compare(self, label: str, text: str, tolerance: float) -> float:
        """Compares in a pool thread, each of which has a process of its own."""
        shown = marked(text)
        if shown is not None and len(shown) > LONGEST:
            return 0.0
        wanted, found = number(label), None if shown is None else number(shown)
        if wanted and found and found.equals(wanted, tolerance):
            return 1.0
        if shown is not None and label.isalpha() and len(label) > 1:
            return float(normal(shown).strip(" .$").removeprefix("\\text{").rstrip("}").casefold() == label.casefold())
        worker = getattr(self._mine, "worker", None)
        if worker is None or not worker.alive:
            worker = self._mine.worker = Worker(self.memory)
        found_text = normal(text[-LONGEST:]) if shown is None else f"\\boxed{{{_bare(normal(shown))}}}"
        reply = worker.ask({"expected": _expected(label), "answer": found_text, "tolerance": tolerance}, self.seconds)
        if reply is None:
            return 0.0  # out of time or memory: of what the model wrote
        if "error" in reply:
            raise ValueError(f"the label {label!r} {reply['error']}")
        return float(reply["score"])


@cache
def shared() -> Maths:
    """Returns the instance that other verifiers share."""
    return Maths()


def _made(seconds: float, memory: int, processes: int) -> Maths:
    return Maths(seconds=seconds, memory=memory, processes=processes)


def _expected(label: str) -> str:
    shown = marked(label)
    label = normal(label if shown is None else shown)
    return label if label.count("$") > 1 else f"${_bare(label)}$"


def _bare(text: str) -> str:
    """Returns the text without dollars, which mark a currency or LaTeX maths."""
    return text.replace("$", " ").strip().rstrip(".")


class Worker:
    """A process that has math-verify loaded. It ends when its socket closes, so that none is left
    when this process dies."""

    def __init__(self, memory: int) -> None:
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(memory), str(theirs.fileno())],  # -P: this folder has a `code.py`
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self.connection = Connection(ours.detach())
        self.end = weakref.finalize(self, _end, self.process, self.connection)
        if self.ask({}, START) is None:
            raise RuntimeError("the process that compares answers did not start")

    @property
    def alive(self) -> bool:
        return self.end.alive

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Returns the worker's reply. If there is none after `seconds`, or the worker has died,
        ends the worker and returns None."""
        with suppress(EOFError, OSError):
            self.connection.send_bytes(json.dumps(question).encode())
            if self.connection.poll(seconds):
                return dict(json.loads(self.connection.recv_bytes()))
        self.end()
        return None


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()
