"""The check of the demo's results: it passes those of a demo that worked, and no others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from instep.demo.record import Exam, Run, Step

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_demo.py"
PUSH = {
    "version": "step-1",
    "digest": "4c4c35df820709d2",
    "engines": [{"engine": "vllm", "read_back": 61}],
    "failed": [],
    "canary_gap": 1e-5,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def save(out: Path, after: float = 0.9, **push: Any) -> Path:
    """The results of a demo of one step."""
    step = Step(1, [], 0.5, [0.5], 100, 1.0, 1.0, 0.1, PUSH | push)
    exams = Exam(0.3, []), Exam(after, [])
    Run("a model", "an engine", "a CPU", {}, 0, "1 if right", *exams, [step], {}).save(out / "demo.json")
    (out / "demo.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20_000))
    return out


def test_a_demo_that_worked_passes(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(save(tmp_path))
    assert "the reward rose, every push was proved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"after": 0.45}, "did not rise: 0.30 to 0.45"),
        ({"version": "step-2"}, "step-1 did not reach the engine"),
        ({"engines": []}, "step-1 did not reach the engine"),
        ({"failed": ["vllm"]}, "step-1 did not reach the engine"),
        ({"digest": "0" * 16}, "step-1 was not compared"),
        ({"engines": [{"engine": "vllm", "read_back": 0}]}, "step-1 was not compared"),
        ({"canary_gap": None}, "step-1 was served without a canary"),
    ],
)
def test_a_demo_that_did_not_work_fails(script: ModuleType, tmp_path: Path, wrong: dict[str, Any], complaint: str) -> None:
    save(tmp_path, **wrong)
    with pytest.raises(SystemExit, match=complaint):
        script.main(tmp_path)


def test_a_missing_result_fails(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="did not reach its end"):
        script.main(tmp_path)
    save(tmp_path)
    (tmp_path / "demo.png").write_bytes(b"")
    with pytest.raises(SystemExit, match="is no picture"):
        script.main(tmp_path)
    run = msgspec.json.decode((tmp_path / "demo.json").read_bytes(), type=Run)
    run.steps = []
    run.save(tmp_path / "demo.json")
    with pytest.raises(SystemExit, match="made no step"):
        script.main(tmp_path)
