"""Says what `instep plan` starts, and checks whether this machine has the memory for it.

Free memory is that of the machine, and of each control group around this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from instep.bench.subjects import ON_CPU, ROOM
from instep.errors import ConfigError

KV_CACHE = int(ON_CPU["VLLM_CPU_KVCACHE_SPACE"]) << 30
"""Bytes of each worker's KV cache."""
COPIES = 6
"""Copies of the weights: the trainer's, a version on its way, and the engine's, as they come, as
vLLM packs them, and what a first push holds of both. At the peak 5.8 (0.27 and 1.2 GB, vLLM 0.32,
2026-11-29)."""
PROCESSES = 1_200_000_000
"""Bytes that the trainer and vLLM's core take beside these, measured there too: PyTorch and
vLLM."""
WORKER = 700_000_000
"""Bytes that each worker takes beside these, measured in the same way."""
GROUPS = "sys/fs/cgroup"
ONE = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
TWO = ("memory.max", "memory.current", "inactive_file")
"""Files of a group, and a line of its `memory.stat`, in the versions of control groups."""


def announced(name: str, nbytes: int, tp: int, gpus: int) -> str:
    """Returns a text about what will start. nbytes: of the model's weights. gpus: of this machine.

    Raises `ConfigError`, with both numbers, where it takes more memory than is free.
    """
    where = f"{tp} GPU{'s' * (tp > 1)}" if gpus else "the CPU"
    vllm = f"plan starts a real vLLM on {where}, with random weights of {name} ({_gb(nbytes)})"
    takes = _on_gpus(nbytes, tp, gpus) if gpus else _on_cpu(nbytes, tp)
    return f"{vllm}, and a trainer with as many beside it; about a minute, and both end with it\n{takes}"


def _on_cpu(nbytes: int, tp: int) -> str:
    need = COPIES * nbytes + tp * (KV_CACHE + WORKER) + PROCESSES
    parts = f"{COPIES} x {_gb(nbytes)} of weights, {_gb(tp * KV_CACHE)} of KV cache"
    parts += f", {_gb(tp * WORKER + PROCESSES)} for the processes"
    text, found = f"it needs about {_gb(need)} of memory ({parts})", free()
    if found is None:
        return text
    _refuse(text, need, found.nbytes, found.limit)
    return f"{text}; {_gb(found.nbytes)} are free"


def _on_gpus(nbytes: int, tp: int, gpus: int) -> str:
    need = Counter(dict.fromkeys(range(tp), nbytes // tp + ROOM)) + Counter({gpus - 1: nbytes})
    parts = {gpu: f"{_gb(wanted)} of GPU {gpu}" for gpu, wanted in need.items()}
    for gpu, part in parts.items():
        left = torch.cuda.mem_get_info(gpu)[0]
        _refuse(f"it needs about {part}", need[gpu], left, "that GPU's memory")
    return "it needs about " + ", ".join(parts.values())


def _refuse(text: str, need: int, free: int, limit: str) -> None:
    if need > free:
        raise ConfigError(
            f"plan would start a vLLM here: {text}, and {_gb(free)} are free ({limit})",
            next_step="run it where there is more, or end what takes it",
        )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


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
