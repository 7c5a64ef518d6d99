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

from instep import WeightSync
from instep.bench import machine, shapes
from instep.bench.memory import trim
from instep.bench.subjects import VllmSubject
from instep.bench.trainer import Trainer


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen3-8b"
    on_host("trainer")
    trainer, pushes = Trainer(name, "cuda:0"), []
    trim()
    with tempfile.TemporaryDirectory() as folder:
        with apart():
            subject = VllmSubject(trainer, shapes.folder(name, Path(folder)), int(OTHER))
        try:
            with WeightSync(trainer.model, [subject.engine], transport="nccl") as sync:
                for version in ("first", "second", "third", "fourth"):
                    trainer.step()
                    before = torch.cuda.mem_get_info(int(OTHER))[0]
                    receipt = sync.push(version)
                    (engine,) = receipt.engines
                    pushes.append({
                        "version": version, "seconds": receipt.seconds, "pause": receipt.pause, "apply": engine.apply,
                        "direct": len(engine.direct), "reloaded": len(engine.reload), "read_back": engine.read_back,
                        "kept_gpu_memory": before - torch.cuda.mem_get_info(int(OTHER))[0],
                    })  # fmt: skip
            gap, _ = subject.look(trainer)
        finally:
            subject.close()
    setting = {
        "shapes": name, "nbytes": trainer.nbytes, "way": "nccl, through a socket of one host" if ALONE else "nccl",
        "machine": machine.cards(), "versions": machine.versions(), "command": f"python tests/gpu/first_push.py {name}",
        "date": machine.setting(name, trainer, 1).date,
    }  # fmt: skip
    print(json.dumps({"setting": setting, "pushes": pushes, "largest gap of log-probabilities": gap}, indent=1))


if __name__ == "__main__":
    main()
