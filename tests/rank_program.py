"""Run as a program, once for each rank of a trainer: plays the cases of `rank_cases.py` that it is told of, and writes down what it saw.

python rank_program.py OUT RANK SIZE PORT CASE...
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path


def main(out: str, rank: int, size: int, port: int, names: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    torch.set_num_threads(1)
    if any("zero" in name for name in names):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
        deepspeed.init_distributed("gloo")
    else:
        torch.distributed.init_process_group("gloo")
    from rank_cases import play

    results = {}
    for name in names:
        try:
            results[name] = play(name)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        Path(f"{out}.{rank}").write_text(json.dumps(results))  # after each: a case may end the process
    os._exit(0)  # groups that ended in an error may keep threads waiting


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
