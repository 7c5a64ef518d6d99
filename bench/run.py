"""instep beside what a user would do instead on a CPU, in one run: `make bench`.

SmolLM2-135M in bfloat16, a trainer process and a real vLLM in another. Every way brings the same tensors to the same engine:

    instep            WeightSync.push
    reload in memory  the floor: vLLM's own reload session over tensors that the worker has in its memory already
    save and reload   save_pretrained to a RAM disk, then vLLM's reload from that directory
    gloo              one broadcast for each parameter, into the same reload session

Prints a table and writes JSON to bench/results/. Medians; memory is what trainer, engine and shared memory hold at the peak beyond what
they held before the first run, sampled every 5 ms, in the timed runs and in the first ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist

from instep import WeightSync
from instep.demo.model import smollm2
from instep.transport.shm import directory

WARM_UPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each way")
    repeats = parser.parse_args().repeats
    folder = smollm2()
    llm = start_vllm(folder)
    model = load(folder)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    pids = [os.getpid(), *llm.collective_rpc("bench_pid")]
    results = {}
    with WeightSync(source=model, engines=[llm]) as sync, tempfile.TemporaryDirectory(dir=directory()) as ram:
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "instep": lambda: push(sync),
            "reload in memory": lambda: reload_in_memory(llm),
            "save and reload": lambda: save_and_reload(llm, model, Path(ram)),
            "gloo": lambda: gloo(llm, tensors),
        }
        llm.collective_rpc("bench_hold", args=(str(folder),))
        for name, way in ways.items():
            if name == "save and reload":
                llm.collective_rpc("bench_drop")
            results[name] = measure(way, repeats, pids, model)
            print(f"{name}: {results[name]}", flush=True)
    report(results, sum(tensor.nbytes for tensor in tensors.values()), repeats)


def start_vllm(folder: Path) -> Any:
    from vllm import LLM

    return LLM(
        str(folder),
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        dtype="bfloat16",
        worker_extension_cls="extension.BenchExtension",
    )


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    step(model)  # its weights are the file's own pages until they change
    return model


def push(sync: WeightSync) -> dict[str, float]:
    receipt = sync.push(f"v{time.time_ns()}")
    return {"pause": receipt.pause, **{f"phase {name}": seconds for name, seconds in receipt.seconds.items() if name != "total"}}


def reload_in_memory(llm: Any) -> dict[str, float]:
    return {"pause": max(llm.collective_rpc("bench_reload_held"))}


def save_and_reload(llm: Any, model: Any, ram: Path) -> dict[str, float]:
    model.save_pretrained(ram / "checkpoint")
    started = time.perf_counter()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(ram / "checkpoint")})
    pause = time.perf_counter() - started
    shutil.rmtree(ram / "checkpoint")
    return {"pause": pause}


def gloo(llm: Any, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """A group of its own each time is what a first push costs; here it is made once and kept."""
    group = trainer_group(llm)
    described = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
    sender = threading.Thread(target=lambda: [group.broadcast(tensor, 0).wait() for tensor in tensors.values()])
    sender.start()
    pause = max(llm.collective_rpc("bench_receive", args=(described,)))
    sender.join()
    return {"pause": pause}


_groups: list[Any] = []


def trainer_group(llm: Any) -> Any:
    if not _groups:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        made: list[Any] = []
        joined = threading.Thread(
            target=lambda: made.append(dist.ProcessGroupGloo(dist.PrefixStore("bench", store), 0, 2, timedelta(seconds=60)))
        )
        joined.start()
        llm.collective_rpc("bench_join", args=(store.port,))
        joined.join()
        _groups.extend((made[0], store))
    return _groups[0]


def measure(way: Callable[[], dict[str, float]], repeats: int, pids: list[int], model: Any) -> dict[str, float]:
    base, runs, peaks = held(pids), [], []
    for count in (WARM_UPS, repeats):
        with peak_memory(pids, base) as peak:
            for _ in range(count):
                step(model)
                started = time.perf_counter()
                found = way()
                runs.append({"total": time.perf_counter() - started, **found})
        peaks.append(peak[0])
    timed = runs[WARM_UPS:]
    medians = {name: statistics.median(run[name] for run in timed) for name in timed[0]}
    return medians | {"first total": runs[0]["total"], "first memory": peaks[0], "memory": peaks[1]}


def step(model: Any) -> None:
    """Stands for the optimizer: every weight changes, and none leaves its range."""
    with torch.no_grad():
        for param in model.parameters():
            param.neg_()


@contextmanager
def peak_memory(pids: list[int], base: float) -> Iterator[list[float]]:
    """Bytes beyond `base`: private memory of the processes, and the RAM disk with the segments in it."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], held(pids) - base)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def held(pids: list[int]) -> float:
    def private(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    disk = os.statvfs(directory())
    return sum(private(pid) for pid in pids) + (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def report(results: dict[str, dict[str, float]], nbytes: int, repeats: int) -> None:
    ours, floor = results["instep"], results["reload in memory"]["total"]
    setting = {
        "model": "SmolLM2-135M bfloat16",
        "bytes": nbytes,
        "repeats": repeats,
        "cpu": next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"vllm": vllm_version(), "python": platform.python_version()},
    }
    print(f"\n{setting['model']}, {nbytes / 1e6:.0f} MB, {setting['cpu']}, {setting['cores']} cores, medians of {repeats}")
    print(f"{setting['versions']}\n")
    print("| way | total ms | pause ms | extra memory MB (first runs) | total / floor | total / instep |\n|---|---|---|---|---|---|")
    for name, result in results.items():
        memory = f"{result['memory'] / 1e6:.0f} ({result['first memory'] / 1e6:.0f})"
        ratios = f"{result['total'] / floor:.2f} | {result['total'] / ours['total']:.2f}"
        print(f"| {name} | {1e3 * result['total']:.0f} | {1e3 * result['pause']:.0f} | {memory} | {ratios} |")
    out = Path(__file__).parent / "results" / "cpu.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"setting": setting, "results": results}, indent=1) + "\n")
    print(f"\nwritten to {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out.name}")


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    main()
