"""Pushes from several ranks of an FSDP2 trainer to an engine of two tensor-parallel workers, without gathering and with it, in one run.

    python -m instep.bench.sharded [--shapes NAME] [--repeats N] [--out DIR]

Every rank is a process, and so is every worker. On CPUs alone: the way over two GPUs is `instep bench --trainer fsdp2`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from msgspec import json, structs

from instep.bench import options, save
from instep.bench.group import free_port
from instep.bench.kept import Ranked, Sharded
from instep.bench.machine import processor, setting
from instep.bench.page import section
from instep.bench.trainer import Trainer

WAYS = ("shm, nothing gathered", "gloo, gathered bucket by bucket", "gloo, gathered whole, then sent")
SIZES = (2, 4)
SECONDS = 900.0


def play(size: int, shapes: str, repeats: int, folder: Path) -> list[dict[str, Ranked]]:
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
    return [json.decode(out.read_bytes(), type=dict[str, Ranked]) for out in outs]


def main(arguments: list[str]) -> None:
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
