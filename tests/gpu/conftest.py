"""Tests that need a CUDA GPU. Elsewhere they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import on_host

on_host("trainer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; bench/gpu_session.sh runs these where there is one"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_pretrained` wrote of the tiny model with seed 2."""
    from gpu_models import model

    path = tmp_path_factory.mktemp("checkpoint")
    model("tiny", 2, "cuda:0").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def from_disk(checkpoint: Path) -> Iterator[Any]:
    """What an engine generates that has loaded this checkpoint, with CUDA graphs on."""
    from gpu_models import PROMPTS, greedy, start, stop_vllm

    llm = start(checkpoint, load_format="auto", enforce_eager=False)
    yield greedy(llm, PROMPTS)
    stop_vllm(llm)
