"""SkyRL's worker extension under instep's, and a real vLLM, in a process that ends with it.

    python skyrl_program.py FOLDER instep

writes FOLDER/seen.json as `verl_program.py` does. SkyRL's `update_weights_nccl` runs as it stands. Below it, where vLLM's engine of NCCL
needs GPUs, tensors come out of a file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import STEPS, Trainer, engine, look
from safetensors.torch import load_file, save_file

from instep.bench.subjects import stop_vllm


class FromFile:
    """What SkyRL asks of the engine of a weight transfer."""

    def __init__(self, path: str) -> None:
        self.path = path

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return SimpleNamespace(**info)

    def receive_weights(self, info: Any, load_weights: Any) -> None:
        tensors = load_file(self.path)
        for name in info.names:  # one after the other, as buckets come
            load_weights([(name, tensors[name])])


def from_file(wrapper: Any, path: str) -> None:
    wrapper.worker.weight_transfer_engine = FromFile(path)
    torch.accelerator.synchronize = lambda: None  # there is no accelerator


def update(llm: Any, path: str, pairs: list[Any]) -> str | None:
    """One update as SkyRL's client calls for it. The error that it hears, or None."""
    save_file({name: value.contiguous() for name, value in pairs}, path)
    half = len(pairs) // 2
    try:
        llm.collective_rpc("skyrl_start_weight_update", kwargs={"is_checkpoint_format": True})
        for chunk in (pairs[:half], pairs[half:]):
            llm.collective_rpc("update_weights_nccl", kwargs={"update_info": {"names": [name for name, _ in chunk]}})
        llm.collective_rpc("skyrl_finish_weight_update")
    except Exception as error:
        return str(error)
    return None


def main(folder: Path) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the test's own call
    trainer, path = Trainer(), str(folder / "sent.safetensors")
    trainer.model.save_pretrained(folder / "model")
    llm = engine(folder / "model", worker_extension_cls="instep.integrations.skyrl.WorkerExtension")
    llm.collective_rpc(from_file, args=(path,))
    seen: dict[str, Any] = {"before": look(llm, trainer), "steps": []}
    for _ in range(STEPS):
        trainer.step()
        seen["stale"] = look(llm, trainer)
        seen["steps"].append({"error": update(llm, path, trainer.pairs()), **look(llm, trainer)})
    served = look(llm, trainer)["tokens"]
    trainer.step()
    error = update(llm, path, trainer.pairs(without="model.layers.1.mlp.up_proj.weight"))
    seen["incomplete"] = {"error": error, "kept": look(llm, trainer)["tokens"] == served}
    seen["healed"] = {"error": update(llm, path, trainer.pairs()), **look(llm, trainer)}
    (folder / "seen.json").write_text(json.dumps(seen, indent=1))
    stop_vllm(llm)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
