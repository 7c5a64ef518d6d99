"""verl's own sender of buckets and a real vLLM, in a process that ends with it.

    python verl_program.py FOLDER instep|stock

writes FOLDER/seen.json: what was seen after each of three steps, and after an update that lacks a tensor.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from common import STEPS, Trainer, engine, look

from instep.bench.subjects import stop_vllm

EXTENSIONS = {
    "instep": "instep.integrations.verl.WorkerExtension",
    "stock": "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
}


def update(llm: Any, pairs: list[Any]) -> str | None:
    """One update as verl's rollout makes it. The error that its trainer hears, or None."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    address = f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"
    sender = BucketedWeightSender(address, bucket_size_mb=1, use_shm=True)
    sending = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(pairs))), daemon=True)
    sending.start()
    error = None
    try:
        llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})  # verl's server looks at no answer
    except Exception as raised:
        error = str(raised)
    sending.join(30)
    return error if not sending.is_alive() else f"verl's sender waits for ever; {error}"


def main(folder: Path, kind: str) -> None:
    os.environ["VERL_RAY_JOB_ID"] = f"{folder.name}-{os.getpid()}"
    trainer = Trainer()
    trainer.model.save_pretrained(folder / "model")
    llm = engine(folder / "model", worker_extension_cls=EXTENSIONS[kind])
    seen: dict[str, Any] = {"before": look(llm, trainer), "steps": []}
    try:
        for _ in range(STEPS):
            trainer.step()
            seen["stale"] = look(llm, trainer)
            seen["steps"].append({"error": update(llm, trainer.pairs()), **look(llm, trainer)})
        served = look(llm, trainer)["tokens"]
        trainer.step()
        error = update(llm, trainer.pairs(without="model.layers.1.mlp.up_proj.weight"))
        seen["incomplete"] = {"error": error, "kept": look(llm, trainer)["tokens"] == served}
        seen["healed"] = {"error": update(llm, trainer.pairs()), **look(llm, trainer)}
        if kind == "instep":
            seen["status"] = llm.collective_rpc("instep_status")
    finally:
        (folder / "seen.json").write_text(json.dumps(seen, indent=1))
        stop_vllm(llm)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
