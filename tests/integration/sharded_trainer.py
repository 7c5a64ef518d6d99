"""Run as a program, once for each rank: sharded trainers that bring a vLLM, held by rank 0, to their weights, by a `WeightSync` and with
Open Instruct's names.

python sharded_trainer.py OUT RANK PORT FAMILY CHECKPOINT
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engines import greedy, start
from models import PROMPTS, tiny
from zero_trainer import broadcasts

from instep import WeightSync

WAYS = [("fsdp2", "shm", 2), ("zero3", "gloo", 3), ("fsdp1", "shm", 2), ("fsdp2-columns", "gloo", 3), ("tp", "shm", 2), ("zero3", "shm", 3)]
"""How the trainer shards, the transport, and the seed of the weights."""


def main(out: str, rank: int, port: int, family: str, checkpoint: str) -> None:
    llm = start(Path(checkpoint), worker_extension_cls="instep.dropin.open_instruct.WorkerWrap") if rank == 0 else None
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu"
    )
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
    deepspeed.init_distributed("gloo")
    from instep.bench.subjects import stop_vllm

    results = {"pushes": pushes(llm, family), "broadcasts": broadcasts(deepspeed, llm, family)}
    Path(f"{out}.{rank}").write_text(json.dumps(results))
    torch.distributed.barrier()
    if llm is not None:
        stop_vllm(llm)
    os._exit(0)  # threads of Gloo may wait for each other


def pushes(llm: Any, family: str) -> dict[str, Any]:
    """llm: None on other ranks than the first."""
    from helpers.rank_models import WRAPS

    results: dict[str, Any] = {"generated": [], "digests": []}
    for number, (wrap, transport, seed) in enumerate(WAYS):
        model = tiny(family, seed)
        trainer = WRAPS[wrap](model, copy.deepcopy(model))
        torch.distributed.barrier()  # the engine may take its time to start
        sync = WeightSync(trainer.module, [llm] if llm else [], transport=transport, timeout=120)
        results["digests"].append(sync.push(f"v{number}").digest)
        if llm is not None:
            results["generated"].append(greedy(llm, PROMPTS))
        sync.close()
    return results


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
