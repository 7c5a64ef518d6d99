"""The drop-in for TorchRL in programs of their own: the example of another RPC, and a machine without TorchRL."""

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


def test_without_torchrl(tmp_path: Path) -> None:
    """Neither the import nor an update needs it."""
    program = """
import sys
sys.modules["torchrl"] = None
import torch
from instep import MemoryEngine
from instep.dropin.torchrl import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, get_model_metadata
weights = {"layer.weight": torch.ones(2, 2)}
engine = MemoryEngine({"layer.weight": torch.zeros(2, 2)})
sender = VLLMWeightSyncScheme().create_sender()
sender.init_all_workers_group(get_model_metadata(weights), engine)
sender.update_weights(weights)
scheme = VLLMDoubleBufferSyncScheme(sys.argv[1])
scheme.create_sender().update_weights({"layer.weight": torch.full((2, 2), 2.0)})
before = engine.hosts[0].model.get_parameter("layer.weight").tolist()
scheme.create_receiver(engine).poll_and_apply()
print(before, engine.hosts[0].model.get_parameter("layer.weight").tolist(), "tensordict" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[[1.0, 1.0], [1.0, 1.0]] [[2.0, 2.0], [2.0, 2.0]] False", done.stderr
