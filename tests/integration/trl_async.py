"""A real asynchronous GRPO trainer of TRL, whose weights go to an engine in memory: nobody generates, and each rollout is given to it.

    python trl_async.py FOLDER

writes FOLDER/seen.json: versions, and whether the engine has the trainer's weights after each sync.
"""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from typing import Any

import torch
from models import add_tokenizer, save, tiny


class Idle:
    """A rollout worker that makes no rollout, and notes the versions that it is told."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self.versions: list[int] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, version: int) -> None:
        self.versions.append(version)


def main(folder: Path) -> dict[str, Any]:
    import trl.experimental.async_grpo.async_grpo_trainer as theirs
    from datasets import Dataset

    from instep import MemoryEngine
    from instep.integrations.trl import WeightTransfer

    theirs.get_peak_flops_per_device = lambda *_, **__: 1e12  # it asks CUDA for the name of a GPU
    path = str(add_tokenizer(save(model := tiny("llama", 1), folder / "model")))
    engine, worker = MemoryEngine(model.state_dict()), Idle()
    trainer = theirs.AsyncGRPOTrainer(
        path,
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        args=theirs.AsyncGRPOConfig(
            output_dir=str(folder / "out"), use_cpu=True, bf16=False, max_steps=2, report_to=[], model_init_kwargs={"dtype": "float32"}
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "t1"}]] * 8}),
        rollout_worker=worker,
        weight_transfer=WeightTransfer([engine]),
    )
    seen: dict[str, Any] = {"same": [], "served": []}
    for _ in range(3):
        own = trainer.accelerator.unwrap_model(trainer.model)
        with torch.no_grad():
            for param in own.parameters():
                param.add_(0.05 * torch.randn_like(param))
        trainer._sync_weight()
        expected = MemoryEngine({name: tensor.bfloat16() for name, tensor in own.state_dict().items()})
        seen["same"].append(engine.generate([5, 6, 7], max_tokens=8) == expected.generate([5, 6, 7], max_tokens=8))
        seen["served"].append(engine.version)
    return {**seen, "told": worker.versions, "model_version": trainer.model_version}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "seen.json").write_text(json.dumps(main(target), indent=1))
