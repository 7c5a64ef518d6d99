"""The README's Python example, as it stands, against a real vLLM."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ARGUMENTS, settings
from models import tiny

from instep.bench.subjects import stop_vllm


def test_the_seven_lines_run(
    checkpoints: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)

    def train(model: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.neg_()

    names: dict[str, Any] = {"path": str(checkpoints("llama", 1)), "model": tiny("llama", 2), "steps": 2, "train": train}
    with settings():
        import vllm

        # The example leaves to vLLM what a checkpoint without a tokenizer and a machine without a GPU need.
        monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, **ARGUMENTS))
        exec(example, names)
    out = capsys.readouterr().out
    assert re.search(r"^step-0: .* to 1 engine in ", out, re.MULTILINE)
    assert re.search(r"^step-1: .* digest [0-9a-f]{16}", out, re.MULTILINE)
    names["sync"].close()
    stop_vllm(names["llm"])
