"""Pushes from several ranks of an FSDP2 trainer to an engine of two tensor-parallel workers, without gathering and with it, in one run.

    python -m instep.bench.sharded [--shapes NAME] [--repeats N] [--out DIR]

Every rank is a process, and so is every worker. On CPUs alone: the way over two GPUs is `instep bench --trainer fsdp2`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import structs, to_builtins

from instep.bench.group import free_port
from instep.bench.machine import processor, setting
from instep.bench.trainer import Trainer

WAYS = ("shm, nothing gathered", "gloo, gathered bucket by bucket", "gloo, gathered whole, then sent")
SIZES = (2, 4)
SECONDS = 900.0


def play(size: int, shapes: str, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Runs a trainer of `size` ranks. Returns what each rank measured."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-m", "instep.bench.sharded_rank", shapes, str(repeats)]
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
    return [json.loads(out.read_text()) for out in outs]


def table(results: dict[str, Any]) -> str:
    """Returns medians, one line for each way and number of ranks."""
    lines = [f"{'ranks':>5}  {'way':<32} {'ms':>7} {'MB gathered':>12} {'MB read':>8}  private MB at the peak, by rank"]
    for size, ranks in results["ranks"].items():
        for way in WAYS:
            first = ranks[0][way]
            private = ", ".join(f"{rank[way]['private'] / 1e6:.0f}" for rank in ranks)
            gathered = sum(rank[way]["given"] for rank in ranks[1:]) if way != WAYS[0] else 0
            took = f"{1e3 * median(first['seconds']):>7.0f} {gathered / 1e6:>12.0f} {first['read'] / 1e6:>8.0f}"
            lines.append(f"{size:>5}  {way:<32} {took}  {private}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    options = {"--shapes": "smollm2-135m", "--repeats": "7", "--out": "bench-results"}
    options |= dict(zip(arguments[::2], arguments[1::2], strict=False))
    shapes, repeats, out = options["--shapes"], int(options["--repeats"]), Path(options["--out"])
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch:
        ranks = {size: play(size, shapes, repeats, Path(scratch)) for size in SIZES}
    command = f"python -m instep.bench.sharded --shapes {shapes} --repeats {repeats}"
    where = setting(shapes, Trainer(shapes, "meta"), repeats, "fsdp2")
    where = structs.replace(where, kind="cpu", machine=[processor()], command=command)
    results = {"setting": to_builtins(where), "ranks": ranks}
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"cpu-sharded-{shapes}.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{table(results)}\n\nwritten to {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
