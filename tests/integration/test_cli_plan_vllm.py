"""`instep plan` with a real vLLM: a directory that has a config and no weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from engines import SETTINGS
from models import tiny

RUN = "from instep.cli import main; main()"


def test_the_rows_of_a_mixture_of_experts_say_which_layers_reload_and_why(tmp_path: Path) -> None:
    """The command, from its arguments to its exit code; the result alone is on stdout, whatever vLLM prints."""
    config = tiny("qwen3_moe", 1).config
    config.architectures = ["Qwen3MoeForCausalLM"]  # as a model that is saved writes it
    config.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RUN, "plan", tmp_path, "--json"],
        env={**os.environ, **SETTINGS, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"plan starts a real vLLM on the CPU, with random weights of {tmp_path}" in done.stderr
    assert "1.1 GB of KV cache" in done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    experts = next(row for name, row in rows.items() if name.startswith("model.layers.0..1.mlp.experts") and row["params"])
    assert experts["way"] == "reload"
    assert experts["reason"] == "model.layers.*.mlp.experts.routed_experts.w2_weight is not stored as the checkpoint has it"
    assert (experts["routes"], experts["nbytes"]) == (4 * 3, 4 * 3 * 64 * 32 * 2)
    attention = rows["model.layers.0..1.self_attn.qkv_proj"]
    assert attention["layers"] == [f"model.layers.{index}.self_attn.qkv_proj" for index in range(2)]
    assert (attention["way"], attention["routes"], attention["params"]) == ("rebuilt", 3, ["weight bfloat16[256, 64]"])
    assert rows["model.norm"]["way"] == "direct"
    assert sum(len(row["layers"]) * row["nbytes"] for row in rows.values()) == found["nbytes"]
    assert (found["transport"], found["casts"], found["widened"]) == ("shm", {}, {})
    assert found["second"]["seconds"]["total"] > found["second"]["pause"] > 0
