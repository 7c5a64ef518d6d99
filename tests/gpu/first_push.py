"""What the first push over NCCL costs, beside later ones: python tests/gpu/first_push.py [SHAPES] > RESULT.json

On a machine with one GPU the bytes take a socket (see `gpus.py`): what the first push takes beyond a later one is what counts there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from gpus import ALONE, OTHER, apart, on_host
from msgspec import structs, to_builtins

from instep import WeightSync
from instep.bench import machine, shapes
from instep.bench.memory import trim
from instep.bench.subjects import VllmSubject
from instep.bench.trainer import Trainer


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen3-8b"
    gpu = int(OTHER)
    on_host("trainer")
    trainer, pushes = Trainer(name, "cuda:0"), []
    trim()
    with tempfile.TemporaryDirectory() as folder:
        with apart():
            subject = VllmSubject(trainer, shapes.folder(name, Path(folder)), gpu)
        try:
            with WeightSync(trainer.model, [subject.engine], transport="nccl") as sync:
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
    setting = structs.replace(machine.setting(name, trainer, len(pushes)), command=f"python tests/gpu/first_push.py {name}")
    way = "nccl, through a socket of one host" if ALONE else "nccl"
    found = {"setting": to_builtins(setting), "way": way, "pushes": pushes, "largest gap of log-probabilities": gap}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
