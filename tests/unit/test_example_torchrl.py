"""The example of another RPC, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from instep import MemoryEngine

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrl_another_rpc.py"


def test_the_engine_says_what_the_trainers_weights_say() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    pushed = re.findall(r"^trainer: (\S+): .* to 1 engine in ", done.stdout, re.MULTILINE)
    said = dict(re.findall(r"^engine: (\S+) says (.*)$", done.stdout, re.MULTILINE))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2)
    assert len(pushed) == 3
    assert said[pushed[-1]] == str(MemoryEngine(model.state_dict()).generate([1, 2, 3], max_tokens=4))
