"""Reads kept results: the JSON files that the benchmarks write, each by what it measured."""

from __future__ import annotations

from pathlib import Path

import msgspec

from instep.bench.results import Results, Setting


class Ranked(msgspec.Struct, frozen=True):
    """Measurements of one way on one rank.

    seconds: of each push. private: bytes of memory at the peak of a push.
    given: bytes that this rank sends of a version.
    read: bytes that all workers together copy into their parameters; rank 0 knows.
    """

    seconds: list[float]
    private: int
    given: int
    read: int


class Sharded(msgspec.Struct, frozen=True, kw_only=True):
    """Pushes from several ranks. ranks: for each number of ranks, what each rank measured, by
    way."""

    setting: Setting
    ranks: dict[str, list[dict[str, Ranked]]]


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """One push of several in a row.

    seconds: by phase. apply: seconds of the worker's copy. kept_gpu_memory: bytes.
    """

    version: str
    seconds: dict[str, float]
    pause: float
    apply: float
    kept_gpu_memory: int


class Pushes(msgspec.Struct, frozen=True, kw_only=True):
    """The first pushes to an engine. way: the transport."""

    setting: Setting
    way: str
    pushes: list[Push]


class Rate(msgspec.Struct, frozen=True):
    """The rate of one way. of_async_llm: the share of the bare engine's rate."""

    tokens_per_second: float
    of_async_llm: float


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of an actor. summary: by way. requests: prompts of a run."""

    setting: Setting
    requests: int
    summary: dict[str, Rate]


Kept = Results | Sharded | Pushes | Generation
KINDS: dict[str, type[Kept]] = {
    "rows": Results,
    "ranks": Sharded,
    "pushes": Pushes,
    "requests": Generation,
}
"""Kinds of files, by the field that no other kind has."""

MODELS = "models-*.json"


def read(folder: Path) -> dict[str, Kept]:
    """Returns every JSON file of a folder by its name without the suffix, those of GPUs first.
    Files of `instep.bench.models` are left out, as they have a page of their own.

    Raises `ValueError` for a file that no benchmark writes, and `msgspec.ValidationError` for one
    with other fields.
    """
    found = {file.stem: _decode(file) for file in sorted(folder.glob("*.json")) if not file.match(MODELS)}
    return dict(sorted(found.items(), key=lambda item: item[1].setting.kind != "gpu"))


def _decode(file: Path) -> Kept:
    fields = msgspec.json.decode(file.read_bytes())
    for field, kind in KINDS.items():
        if field in fields:
            return msgspec.convert(fields, kind)
    raise ValueError(f"{file} has none of {', '.join(KINDS)}: no benchmark writes such a file")
