"""Pushes over CUDA IPC on this machine, beside the rate of a plain copy of the same bytes: `python bench/gpu.py --shapes qwen3-8b`.

The trainer is on GPU 0, the engine on GPU 0 and, where there is one, on GPU 1. Random weights, `load_format="dummy"`, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))

from gpu_models import SHAPES, folder, model, start

from instep import WeightSync

WARM_UPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    trainer = model(arguments.shapes, 1, "cuda:0")
    results = {}
    for device in range(min(2, torch.cuda.device_count())):
        copy = copy_rate(trainer, device)
        results[f"engine on GPU {device}"] = measure(trainer, arguments.shapes, device, arguments.repeats) | {"copy_seconds": copy}
        print(f"engine on GPU {device}: {results[f'engine on GPU {device}']}", flush=True)
    report(arguments.shapes, results, arguments.repeats, arguments.out)


def copy_rate(trainer: Any, device: int) -> float:
    """Seconds for a plain copy of the trainer's parameters, tensor by tensor, to memory on `device`."""
    sources = [param.detach() for param in trainer.parameters()]
    targets = [torch.empty_like(source, device=f"cuda:{device}") for source in sources]
    runs = []
    for _ in range(WARM_UPS + 7):
        synchronize()
        started = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        synchronize()
        runs.append(time.perf_counter() - started)
    del targets
    torch.cuda.empty_cache()
    return statistics.median(runs[WARM_UPS:])


def synchronize() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def measure(trainer: Any, shapes: str, device: int, repeats: int) -> dict[str, Any]:
    llm = start(folder(shapes), str(device), gpu_memory_utilization=0.35)
    runs: list[dict[str, float]] = []
    with WeightSync(trainer, [llm]) as sync:
        for update in range(WARM_UPS + repeats):
            with torch.no_grad():
                for param in trainer.parameters():
                    param.neg_()
            synchronize()
            receipt = sync.push(f"{device}-{update}")
            (engine,) = receipt.engines
            assert update == 0 or not engine.reload, engine.reload
            runs.append({**receipt.seconds, "pause": engine.pause, "apply": engine.apply})
    llm.llm_engine.engine_core.shutdown()
    timed = runs[WARM_UPS:]
    return {name: statistics.median(run[name] for run in timed) for name in timed[0]} | {"first": runs[0]["total"], "bytes": receipt.nbytes}


def report(shapes: str, results: dict[str, dict[str, Any]], repeats: int, out: Path) -> None:
    card = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    setting = {
        "shapes": shapes,
        "cards": card.stdout.strip().splitlines(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "triton", "vllm", "transformers")},
        "command": f"python bench/gpu.py --shapes {shapes} --repeats {repeats}",
    }
    print(f"\n{setting}\n\n| | push ms | pause ms | plain copy ms | push / copy | GB/s |\n|---|---|---|---|---|---|")
    for name, result in results.items():
        total, copy = result["total"], result["copy_seconds"]
        print(
            f"| ipc, {name} | {1e3 * total:.1f} | {1e3 * result['pause']:.1f} | {1e3 * copy:.1f} | {total / copy:.2f} "
            f"| {result['bytes'] / total / 1e9:.0f} |"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / f"gpu-{shapes}.json").write_text(json.dumps({"setting": setting, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
