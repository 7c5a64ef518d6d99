"""What each rank of a trainer does in a test of sharded trainers, and what it reports. Run by `rank_program.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from helpers.rank_failures import FAILURES
from helpers.rank_ipc import IPC
from helpers.rank_models import make, plain
from helpers.rank_rest import REST
from helpers.rank_torn import TORN
from helpers.rank_ways import WAYS, opened
from helpers.source_models import saved
from instep.engine.memory import MemoryEngine
from instep.transport.broadcast import read as broadcast_reader

RANK = int(os.environ["RANK"])


def play(case: str) -> dict[str, Any]:
    """`case` is `kind/argument/...`."""
    kind, *arguments = case.split("/")
    cases: dict[str, Callable[..., dict[str, Any]]] = {"push": push, **FAILURES, **REST, **IPC, **TORN}
    try:
        return cases[kind](*arguments)
    finally:  # a worker stays in its group as long as its process lives: these are many workers in one process
        for _, group in broadcast_reader.JOINED.values():
            group.close()
        broadcast_reader.JOINED.clear()


def push(wrap: str, model: str) -> dict[str, Any]:
    """By every way: before the first forward, between backward and step with gradients pending, and after the step. Whether the engine then
    has what a fresh one has that loads the gathered model, and how many bytes this rank gives."""
    trainer = make(wrap, model)
    first = saved(plain(model, seed=1)) if RANK == 0 else {}
    engines = {way: MemoryEngine(first, tp=2) if RANK == 0 else None for way in WAYS}
    syncs = {way: opened(trainer.module, engine, way) for way, engine in engines.items()}
    found: dict[str, Any] = {"same": {}, "digests": {}}
    for version, before in (("first", None), ("pending", trainer.backward), ("stepped", trainer.step)):
        if before is not None:
            before()
        gathered = trainer.gathered()  # by all ranks
        wanted = MemoryEngine(saved(gathered), tp=2).fingerprint() if RANK == 0 else None
        for way, sync in syncs.items():
            found["digests"][f"{version} {way}"] = sync.push(version).digest
            engine = engines[way]
            found["same"][f"{version} {way}"] = engine is None or (engine.fingerprint() == wanted and engine.version == version)
    for sync in syncs.values():
        sync.close()
    return found
