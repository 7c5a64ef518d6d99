"""What the first push costs, beside later ones: python tests/gpu/first_push.py [SHAPES [nccl|ipc]] > RESULT.json

On a machine with one GPU the bytes of NCCL take a socket (see `gpus.py`): what the first push takes beyond a later one is what counts
there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from gpus import ALONE, OTHER, apart, on_host
from msgspec import structs, to_builtins

from instep import WeightSync
from instep.bench import machine, shapes
from instep.bench.memory import trim
from instep.bench.subjects import VllmSubject
from instep.bench.trainer import Trainer
from instep.config import TransportName


def main() -> None:
    transport: TransportName
    name, transport = (*sys.argv[1:], *("qwen3-8b", "nccl")[len(sys.argv) - 1 :])  # type: ignore[assignment]
    gpu, sockets = int(OTHER), ALONE and transport == "nccl"
    if sockets:
        on_host("trainer")
    trainer, pushes = Trainer(name, "cuda:0"), []
    trim()
    with tempfile.TemporaryDirectory() as folder:
        with apart() if sockets else nullcontext():
            subject = VllmSubject(trainer, shapes.folder(name, Path(folder)), gpu)
        try:
            with WeightSync(trainer.model, [subject.engine], transport=transport) as sync:
                for version in ("first", "second", "third", "fourth"):
                    trainer.step()
                    before = torch.cuda.mem_get_info(gpu)[0]
                    receipt = sync.push(version)
                    (engine,) = receipt.engines
                    pushes.append({
                        "version": version, "seconds": receipt.seconds, "pause": receipt.pause, "apply": engine.apply,
                        "direct": len(engine.direct), "reloaded": len(engine.reload), "read_back": engine.read_back,
                        "kept_gpu_memory": before - torch.cuda.mem_get_info(gpu)[0],
                    })  # fmt: skip
            gap, _ = subject.look(trainer)
        finally:
            subject.close()
    command = " ".join(["python tests/gpu/first_push.py", *sys.argv[1:]])
    setting = structs.replace(machine.setting(name, trainer, len(pushes)), command=command)
    way = "nccl, through a socket of one host" if sockets else transport
    found = {"setting": to_builtins(setting), "way": way, "pushes": pushes, "largest gap of log-probabilities": gap}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
