"""The Triton kernel computes what numpy does, and moves the same words: in Triton's interpreter here, on hardware in tests/gpu."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: it comes with vLLM")
def test_the_kernel_moves_and_sums_up_as_numpy_does() -> None:
    program = Path(__file__).parents[1] / "kernel_cases.py"
    done = subprocess.run(
        [sys.executable, program], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "equal\n"
