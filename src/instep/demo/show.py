"""The demo's output: lines, one row for each step, and on a terminal a spinner that says what is
going on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from instep.demo.record import Exam, Step


class Column(NamedTuple):
    title: str
    width: int
    cell: Callable[[Step], str]
    narrow: bool = True
    """Shown on a narrow terminal too."""


def phases(*names: str) -> Callable[[Step], str]:
    return lambda step: f"{1e3 * sum(step.push['seconds'].get(name, 0.0) for name in names):.0f}"


COLUMNS = (
    Column("step", 7, lambda step: step.push["version"]),
    Column("reward", 6, lambda step: f"{step.reward:.2f}"),
    Column("", 10, lambda step: ("█" * round(10 * step.reward)).ljust(10, "·"), narrow=False),
    Column("tok/s", 5, lambda step: f"{step.tokens_per_second:.0f}"),
    Column("plan", 5, phases("connect", "describe", "plan"), narrow=False),
    Column("publish", 7, phases("publish")),
    Column("prepare", 7, phases("prepare"), narrow=False),
    Column("commit", 6, phases("commit")),
    Column("canary", 6, phases("canary")),
    Column("push", 6, phases("total")),
    Column("pause", 5, lambda step: f"{1e3 * step.push['pause']:.0f}"),
    Column("MB", 5, lambda step: f"{step.push['nbytes'] / 1e6:.3g}"),
    Column("digest", 16, lambda step: step.push["digest"], narrow=False),
    Column("gap", 6, lambda step: "" if step.push["canary_gap"] is None else f"{step.push['canary_gap']:.0e}"),
)


class Show:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.columns = [column for column in COLUMNS if column.narrow or not console.is_terminal or console.width >= 115]
        self.spinner = Spinner("dots")
        self.live = Live(self.spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Show:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style), soft_wrap=True)

    def doing(self, text: str) -> None:
        self.spinner.update(text=text)

    def exam(self, when: str, exam: Exam) -> None:
        self.say(f"\n{when}: {exam.reward:.2f} on questions never trained on")
        for answer in exam.answers[:3]:
            self.say(f"  {answer.question:<34} {answer.reply!r:<64} {answer.reward:.2g}", "dim")
        self.say("")

    def header(self) -> None:
        self.say(" ".join(column.title.rjust(column.width) for column in self.columns) + "    (times in ms)", "bold")

    def row(self, step: Step) -> None:
        styles = {"reward": "bold green", "": "green", "push": "bold", "digest": "dim"}
        cells = ((column.cell(step).rjust(column.width) + " ", styles.get(column.title, "")) for column in self.columns)
        note = "" if step.loss is not None else "nothing to learn: equal rewards"
        self.console.print(Text.assemble(*cells, (note, "dim")), soft_wrap=True)


@contextmanager
def terminal(log: Path, stderr: bool) -> Iterator[Console]:
    """Yields a console on standard output, or on standard error. All other output of this
    process and its children goes to `log`.

    vLLM's workers, and C++ libraries in them, print what no logging setting silences.
    """
    saved = os.dup(1), os.dup(2)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("w") as file, os.fdopen(os.dup(saved[stderr]), "w") as screen:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield Console(file=screen, highlight=False)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(saved, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
