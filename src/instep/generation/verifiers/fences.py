"""Finds the program in an answer."""

from __future__ import annotations

import re
import textwrap

FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^`\r\n]*+)")
"""Possessive (`*+`): nothing is tried twice, so time is linear in the line."""
PYTHON = ("python", "py", "python3", "py3")


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
