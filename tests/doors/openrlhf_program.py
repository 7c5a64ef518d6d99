"""OpenRLHF's loop of broadcasts and a real vLLM that was started with OpenRLHF's own extension, in a process that ends with it.

    INSTEP_ATTACH=1 python openrlhf_program.py FOLDER instep

writes FOLDER/seen.json as `verl_program.py` does. OpenRLHF's group is NCCL's: a group over Gloo stands in its place on both sides.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from common import STEPS, Trainer, engine, free_port, look

from instep.bench.subjects import stop_vllm
from instep.transport.group import Group
from instep.transport.store import find, serve

CPU = torch.device("cpu")


class Broadcasts:
    def __init__(self, group: Group) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        self.group.begin(60)
        self.group.wait(self.group.broadcast(tensor, src))
        self.group.settle()


def over_gloo(host: str, port: int, rank: int, world_size: int, device: Any) -> Broadcasts:
    store = serve(host, port) if rank == 0 else find(host, port, 60)
    return Broadcasts(Group("gloo", store, "openrlhf", rank, world_size, CPU, 60))


def use_gloo(_: Any) -> None:
    from openrlhf.utils import distributed_util

    distributed_util.stateless_init_process_group = over_gloo


def update(llm: Any, group: Any, pairs: list[Any]) -> str | None:
    """One `broadcast_to_vllm`. The error that its trainer hears, or None."""
    for number, (name, value) in enumerate(pairs, 1):
        errors: list[str] = []

        def call(name: str = name, value: Any = value, last: bool = number == len(pairs), errors: list[str] = errors) -> None:
            try:
                llm.collective_rpc("update_weight", args=(name, value.dtype, tuple(value.shape), last))
            except Exception as error:
                errors.append(str(error))

        calling = threading.Thread(target=call)
        calling.start()
        group.broadcast(value, src=0)
        calling.join(60)
        if errors or calling.is_alive():
            return errors[0] if errors else f"the call for {name} does not return"
    return None


def main(folder: Path) -> None:
    trainer = Trainer("llama")
    trainer.model.save_pretrained(folder / "model")
    llm = engine(folder / "model", worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap")
    llm.collective_rpc(use_gloo)
    port = free_port()
    joining = threading.Thread(
        target=lambda: llm.collective_rpc("init_process_group", args=("127.0.0.1", port, 1, 2, "openrlhf", "nccl", False))
    )
    joining.start()
    group = over_gloo("127.0.0.1", port, 0, 2, CPU)
    joining.join(60)
    seen: dict[str, Any] = {"before": look(llm, trainer), "steps": []}
    for _ in range(STEPS):
        trainer.step()
        seen["stale"] = look(llm, trainer)
        seen["steps"].append({"error": update(llm, group, trainer.pairs()), **look(llm, trainer)})
    served = look(llm, trainer)["tokens"]
    trainer.step()
    error = update(llm, group, trainer.pairs(without="model.layers.1.mlp.up_proj.weight"))
    seen["incomplete"] = {"error": error, "kept": look(llm, trainer)["tokens"] == served}
    seen["healed"] = {"error": update(llm, group, trainer.pairs()), **look(llm, trainer)}
    seen["status"] = llm.collective_rpc("instep_status")
    (folder / "seen.json").write_text(json.dumps(seen, indent=1))
    stop_vllm(llm)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
