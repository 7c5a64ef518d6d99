"""`instep doctor`: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.text import Text

from instep.cli import checks
from instep.cli.checks import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(*, self_test: bool = False, json: bool = False) -> int:
    """Check this machine, one line a check: ok, warn or fail, and what to do.

    Exit code 0 unless a check fails.

    Parameters
    ----------
    self_test
        Also start an engine and push to it twice: the same weights change nothing, other weights
        change its outputs.
    json
        Print the findings as JSON on stdout.
    """
    findings: list[Finding] = []
    console = Console(highlight=False, soft_wrap=True)
    for finding in every(self_test):
        findings.append(finding)
        if not json:
            console.print(line(finding))
    failed = sum(finding.level == "fail" for finding in findings)
    if json:
        print(msgspec.json.encode({"ok": failed == 0, "checks": findings}).decode())
    return 1 if failed else 0


def every(self_test: bool) -> Iterator[Finding]:
    for check in checks.CHECKS:
        yield checks.run(check)
    if self_test:
        from instep.cli.self_test import self_test as test

        with stdout_to_stderr():
            findings = test()
        yield from findings


def line(finding: Finding) -> Text:
    text = Text.assemble((f"{finding.level:<5}", COLOURS[finding.level]), f"{finding.name}: {finding.text}")
    return text.append(f"\n     next: {finding.next_step}") if finding.next_step else text


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends file descriptor 1 to stderr while it lasts: engines and their child processes print
    there, and stdout belongs to the result."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
