"""Checks the first line of a commit message: `area: verb ...` in under 72 characters.

Git's hook commit-msg runs it with the message's file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

MOST = 71
SUBJECT = re.compile(r"[a-z][a-z0-9_-]*: [a-z]+ \S")
GITS_OWN = re.compile(r"(Revert|Merge|fixup!|squash!|amend!) ")


def fault(message: str) -> str | None:
    """Returns what is wrong with the message's first line; None if nothing is."""
    subject = message.partition("\n")[0]
    if GITS_OWN.match(subject):
        return None
    if not SUBJECT.match(subject):
        return f"{subject!r} is not `area: verb ...`, in lower case"
    if len(subject) > MOST:
        return f"{subject!r} has {len(subject)} characters, {MOST} are the most: the reason belongs into the body"
    return "the subject ends with a full stop" if subject.endswith(".") else None


if __name__ == "__main__":
    if wrong := fault(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.exit(wrong)
