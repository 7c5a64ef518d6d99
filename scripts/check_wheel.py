"""Try a wheel as a user without vLLM would: python scripts/check_wheel.py DIRECTORY

Installs the wheel in DIRECTORY, with nothing but what it asks for, into an environment of its own;
then times `import instep` and runs the quickstart of `MemoryEngine`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

from setup import ROOT, pins

BOUND = 0.1
"""Seconds for `import instep`."""
TRIES = 9
"""The fastest counts: a busy machine is not the wheel's fault."""
TIME = "import time; t = time.perf_counter(); import instep; print(time.perf_counter() - t)"
ABSENT = "from importlib.util import find_spec; assert not find_spec('vllm'); import instep; print(instep.__file__)"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def main(folder: Path) -> None:
    (wheel,) = folder.glob("instep-*.whl")
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch) / "venv"
        venv.EnvBuilder(with_pip=True, symlinks=True).create(environment)
        python = str(environment / "bin" / "python")

        def run(*arguments: str) -> str:
            command = [python, *arguments]
            return subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.PIPE, text=True).stdout

        torch = f"torch=={version('torch')}"  # the build that works on this machine
        run("-m", "pip", "install", "--quiet", *pins(), torch, str(wheel.resolve()))
        if not run("-c", ABSENT).startswith(str(environment)):
            sys.exit("instep was imported from elsewhere than the wheel")
        program = Path(scratch) / "quickstart.py"
        program.write_text("\n".join(BLOCK.findall((ROOT / "docs" / "quickstart.md").read_text())))
        print(run(str(program)))
        seconds = min(float(run("-c", TIME)) for _ in range(TRIES))
        print(f"{wheel.name} without vLLM: the quickstart runs, `import instep` takes {1e3 * seconds:.1f} ms")
        if seconds >= BOUND:
            sys.exit(f"`import instep` must take less than {1e3 * BOUND:.0f} ms")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
