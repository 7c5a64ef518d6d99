"""One rank of the trainer of `sharded.py`: python -m instep.bench.sharded_rank SHAPES REPEATS OUT"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from instep import WeightSync
from instep.bench.apart import Apart
from instep.bench.memory import private, watching
from instep.bench.shapes import model
from instep.bench.sharded import WAYS
from instep.protocol import ITEM_BYTES

SETTINGS: dict[str, dict[str, Any]] = {
    WAYS[0]: {"transport": "shm"},
    WAYS[1]: {"transport": "gloo"},
    WAYS[2]: {"transport": "gloo", "gather_whole_model": True},
}


@contextmanager
def peak() -> Iterator[list[int]]:
    """Yields a list with this process's highest private memory beyond what it has now, in bytes."""
    found, me = [0], os.getpid()
    base = private(me)

    def look() -> None:
        found[0] = max(found[0], private(me) - base)

    with watching(look):
        yield found


def given(sync: WeightSync, rank: int) -> int:
    """Returns the bytes that this rank sends of each version."""
    role: Any = sync._role
    pieces = role.source.runs[False].given[0] if rank == 0 else role.given[0]
    dtypes = {meta.name: meta.dtype for meta in (role.source if rank == 0 else role).module.describe().tensors}
    return sum(piece.numel * ITEM_BYTES[dtypes[piece.tensor]] for piece in pieces)


def read(sync: WeightSync) -> int:
    """Returns the bytes that all workers together copy into their parameters."""
    session: Any = sync._session
    dtypes = {meta.name: meta.dtype for meta in session.described}
    routes = (route for member in session.fleet.members for worker in member.plan.workers for route in worker.routes)
    return sum(route.source.numel * ITEM_BYTES[dtypes[route.tensor]] for route in routes if route.tensor is not None)


def main(shapes: str, repeats: int, out: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    trained = model(shapes, 1, "cpu").requires_grad_(False)
    names = dict(trained.named_parameters())
    engine = Apart({name: param.data for name, param in names.items()}, tp=2) if rank == 0 else None
    for layer in trained.model.layers:
        fully_shard(layer)
    fully_shard(trained)
    local = [param._local_tensor for param in trained.parameters()]
    results: dict[str, Any] = {}
    prints: list[set[int]] = [set(), set()]
    negations = 0
    for way, settings in SETTINGS.items():
        sync = WeightSync(trained, [engine] if engine else [], timeout=300, **settings)
        seconds, most = [], 0
        for turn in range(-2, repeats):  # the first two warm up: plans, promotion to direct copies, page faults
            torch._foreach_neg_(local)
            negations += 1
            torch.distributed.barrier()
            started = time.perf_counter()
            with peak() as found:
                sync.push(f"{way}-{turn}".replace(" ", "-"))
            if turn >= 0:
                seconds.append(time.perf_counter() - started)
                most = max(most, found[0])
            if engine:
                prints[negations % 2].add(engine.fingerprint())
            torch.distributed.barrier()
        results[way] = {"seconds": seconds, "private": most, "given": given(sync, rank), "read": read(sync) if engine else 0}
        sync.close()
    if engine:
        engine.close()
        if not all(len(some) == 1 for some in prints) or prints[0] == prints[1]:
            sys.exit(f"the ways did not bring the same weights, or not each time others: {prints}")
    out.write_text(json.dumps(results))
    torch.distributed.barrier()
    os._exit(0)  # Gloo's threads may wait for each other


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
