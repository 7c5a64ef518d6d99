"""What other projects send to a real vLLM, by their own senders and receivers: `make doors`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NATS = 0.02
LACKS = "model.layers.1.mlp.up_proj.weight"
SETTINGS = {
    "verl": {"VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_PLATFORM": "cpu"},
    "openrlhf": {"INSTEP_ATTACH": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},  # the second is OpenRLHF's own
    "skyrl": {},
}

pytestmark = [pytest.mark.vllm, pytest.mark.program, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What a program saw of a project's updates: with instep's extension, or `stock`."""

    @cache
    def run(name: str, kind: str = "instep") -> dict[str, Any]:
        python = ROOT / ".cache" / "doors" / name / "bin" / "python"
        if not python.exists():
            pytest.skip(f"{name} is not installed: make doors")
        folder = tmp_path_factory.mktemp(f"{name}-{kind}")
        here = Path(__file__).parent
        environment = {**os.environ, **SETTINGS[name], "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
        command = [str(python), str(here / f"{name}_program.py"), str(folder), kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr[-6000:]
        found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
        return found

    return run


@pytest.mark.parametrize("name", SETTINGS)
class TestWithInstep:
    def test_the_engine_computes_what_the_trainer_does_after_every_update(self, seen: Callable[..., dict[str, Any]], name: str) -> None:
        found = seen(name)
        assert [step["error"] for step in found["steps"]] == [None] * 3
        assert max(step["gap"] for step in found["steps"]) < NATS
        assert all(step["same"] for step in found["steps"])
        assert found["stale"]["gap"] > 5 * NATS, "weights of the step before would not be noticed"

    def test_an_incomplete_update_is_heard_of_and_the_old_weights_serve(self, seen: Callable[..., dict[str, Any]], name: str) -> None:
        found = seen(name)
        assert f"{LACKS} did not come" in found["incomplete"]["error"]
        assert found["incomplete"]["kept"]
        assert found["healed"]["error"] is None
        assert found["healed"]["gap"] < NATS


def test_verl_alone_leaves_weights_on_a_cpu_that_are_neither_old_nor_new(seen: Callable[..., dict[str, Any]]) -> None:
    found = seen("verl", "stock")
    old = found["before"]["tokens"]
    assert all(step["error"] for step in found["steps"])
    assert not any(step["same"] or step["tokens"] == old for step in found["steps"])
