"""The Python of the README and of the quickstart, as it stands, as scripts with a real vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engines import ARGUMENTS, SETTINGS

HERE = Path(__file__).parent
NAMES = """\
from functools import partial

import torch
import vllm
from models import tiny

# The example leaves to vLLM what a checkpoint without a tokenizer and a machine without a GPU need.
vllm.LLM = partial(vllm.LLM, **{arguments})
path, model, steps = {path!r}, tiny("llama", 2), 2


def train(model):
    with torch.no_grad():
        for param in model.parameters():
            param.neg_()


"""


def test_the_seven_lines_run_as_a_script(checkpoints: Callable[[str, int], Path], tmp_path: Path) -> None:
    readme = (HERE.parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names = NAMES.format(arguments=ARGUMENTS, path=str(checkpoints("llama", 1)))
    output = run(tmp_path / "seven_lines.py", names + example)
    assert re.search(r"^step-0: .* to 1 engine in ", output, re.MULTILINE)
    assert re.search(r"^step-1: .* digest [0-9a-f]{16}", output, re.MULTILINE)


def test_the_program_of_the_quickstart_runs_as_a_script(checkpoints: Callable[[str, int], Path], tmp_path: Path) -> None:
    page = (HERE.parents[1] / "docs" / "quickstart.md").read_text()
    (example,) = re.findall(r"```python no-run\n([^`]*import LLM\n.*?)```", page, re.DOTALL)
    names = NAMES.format(arguments=ARGUMENTS, path="")
    program = names + example.replace("Qwen/Qwen3-0.6B", str(checkpoints("llama", 1)))
    output = run(tmp_path / "quickstart.py", program)
    assert re.search(r"^step-1: .* digest [0-9a-f]{16}", output, re.MULTILINE)


def run(script: Path, program: str) -> str:
    """What a file with the program prints."""
    script.write_text(program)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, **SETTINGS, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
