"""Measures the memory that this process and its children may still take: that of the machine,
and of each control group around this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUPS = "sys/fs/cgroup"
ONE = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
TWO = ("memory.max", "memory.current", "inactive_file")
"""Files of a group, and a line of its `memory.stat`, in the versions of control groups."""


class Free(NamedTuple):
    """Memory that may still be taken. nbytes: its size. limit: what sets this bound."""

    nbytes: int
    limit: str


def free(root: Path = Path("/")) -> Free | None:
    """Returns the tightest bound. None if the system tells nothing, as on macOS."""
    return min((*_machine(root), *_groups(root)), default=None)


def _machine(root: Path) -> Iterator[Free]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield Free(int(value.split()[0]) << 10, "the machine's memory")


def _groups(root: Path) -> Iterator[Free]:
    """Yields the bounds of control groups, version 1 and 2. In a container, the topmost group
    that it sees is its own."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / GROUPS / ("memory" if controllers else "")
        limit, usage, cached = ONE if controllers else TWO
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == top.parent:
                break
            most, used = (_number(folder / name) for name in (limit, usage))
            if most is not None and used is not None:
                stat = dict(row.split(" ", 1) for row in _lines(folder / "memory.stat"))
                left = most - used + int(stat.get(cached, 0))  # it gives back what it read from files
                name = f"/{folder.relative_to(top)}".rstrip(".")
                limit_of = f"the limit of {most / 1e9:.1f} GB of the control group {name}"
                yield Free(max(0, left), limit_of)


def _number(file: Path) -> int | None:
    text = "".join(_lines(file))
    return int(text) if text.isdigit() else None  # `max` is none


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
