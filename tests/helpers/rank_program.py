"""Run as a program: groups of processes that are the ranks of a trainer, one group after the other. Each plays the cases of `rank_cases.py`
that it is told of, and writes down what it saw.

python -m helpers.rank_program FOLDER GROUPS

GROUPS: as JSON, the size of each group and its cases. What all ranks need is imported once, before they are forked: it takes many seconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path


def main(folder: Path, groups: list[tuple[int, list[str]]]) -> None:
    import torch

    import helpers.rank_models  # noqa: F401  and with it torch, transformers and peft

    if importlib.util.find_spec("deepspeed"):  # transformers imports it too, when a model is saved
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
    torch.set_num_threads(1)
    for size, names in groups:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        started = [fork(folder, rank, size, port, names) for rank in range(size)]
        for process in started:
            os.waitpid(process, 0)


def fork(folder: Path, rank: int, size: int, port: int, names: list[str]) -> int:
    if process := os.fork():
        return process
    try:
        log = os.open(folder / f"log.{size}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        play(folder / f"results.{size}.{rank}", names)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)  # groups that ended in an error may keep threads waiting


def play(results: Path, names: list[str]) -> None:
    if any("zero" in name for name in names):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        import torch

        torch.distributed.init_process_group("gloo")
    from helpers import rank_cases

    seen = json.loads(results.read_text()) if results.exists() else {}  # of a group of this size before
    for name in names:
        started = time.monotonic()
        try:
            seen[name] = rank_cases.play(name)
        except Exception as error:
            seen[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(f"{time.monotonic() - started:6.2f} s {name}", flush=True)
        results.write_text(json.dumps(seen))  # after each: a case may end the process


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
