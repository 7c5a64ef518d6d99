"""Pushes from several ranks of an FSDP2 trainer to an engine of two tensor-parallel workers,
without gathering and with it, in one run.

    python -m instep.bench.sharded [--shapes NAME] [--repeats N] [--out DIR]

Every rank is a process, and so is every worker. On CPUs alone: the way over two GPUs is `instep
bench --trainer fsdp2`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec import json, structs
from torch.distributed.fsdp import fully_shard

from instep import WeightSync
from instep.bench import options, save
from instep.bench.apart import Apart
from instep.bench.group import free_port
from instep.bench.kept import Ranked, Sharded
from instep.bench.machine import processor, setting
from instep.bench.memory import private, watching
from instep.bench.page import section
from instep.bench.shapes import model
from instep.bench.trainer import Trainer
from instep.protocol import ITEM_BYTES

SIZES = (2, 4)
SECONDS = 900.0
SETTINGS: dict[str, dict[str, Any]] = {
    "shm, nothing gathered": {"transport": "shm"},
    "gloo, gathered bucket by bucket": {"transport": "gloo"},
    "gloo, gathered whole, then sent": {"transport": "gloo", "gather_whole_model": True},
}
"""Ways, and what a `WeightSync` is told for each."""


def play(size: int, shapes: str, repeats: int, folder: Path) -> list[dict[str, Ranked]]:
    """Runs a trainer of `size` ranks. Returns what each rank measured."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-m", "instep.bench.sharded", "--rank", shapes, str(repeats)]
    outs = [folder / f"{size}-{rank}.json" for rank in range(size)]
    started = []
    for rank, out in enumerate(outs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen([*program, str(out)], env=environment | own))
    try:
        codes = [process.wait(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        sys.exit(f"a rank of the trainer failed: exit codes {codes}")
    return [json.decode(out.read_bytes(), type=dict[str, Ranked]) for out in outs]


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
    return sum(piece.rows.numel * ITEM_BYTES[dtypes[piece.tensor]] for piece in pieces)


def read(sync: WeightSync) -> int:
    """Returns the bytes that all workers together copy into their parameters."""
    session: Any = sync._session
    dtypes = {meta.name: meta.dtype for meta in session.described}
    routes = (route for member in session.fleet.members for worker in member.plan.workers for route in worker.routes)
    return sum(route.source.numel * ITEM_BYTES[dtypes[route.tensor]] for route in routes if route.tensor is not None)


def rank(shapes: str, repeats: int, out: Path) -> None:
    """Runs one rank of the trainer, and writes what it has measured."""
    me = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    trained = model(shapes, 1, "cpu").requires_grad_(False)
    names = dict(trained.named_parameters())
    engine = Apart({name: param.data for name, param in names.items()}, tp=2) if me == 0 else None
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
        results[way] = {"seconds": seconds, "private": most, "given": given(sync, me), "read": read(sync) if engine else 0}
        sync.close()
    if engine:
        engine.close()
        if not all(len(some) == 1 for some in prints) or prints[0] == prints[1]:
            sys.exit(f"the ways did not bring the same weights, or not each time others: {prints}")
    out.write_bytes(json.encode(results))
    torch.distributed.barrier()
    os._exit(0)  # Gloo's threads may wait for each other


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--rank"]:
        rank(arguments[1], int(arguments[2]), Path(arguments[3]))
        return
    given = options(__doc__, {"--shapes": "smollm2-135m", "--repeats": "7", "--out": "bench-results"}, arguments)
    shapes, repeats = given["--shapes"], int(given["--repeats"])
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch:
        ranks = {str(size): play(size, shapes, repeats, Path(scratch)) for size in SIZES}
    command = f"python -m instep.bench.sharded --shapes {shapes} --repeats {repeats}"
    where = setting(shapes, Trainer(shapes, "meta"), repeats, "fsdp2")
    where = structs.replace(where, kind="cpu", machine=[processor()], command=command)
    results = Sharded(setting=where, ranks=ranks)
    file = save(Path(given["--out"]), where, "sharded", json.format(json.encode(results), indent=1).decode())
    print(f"{section(results)}\n\nwritten to {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
