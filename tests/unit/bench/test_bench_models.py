"""The matrix of families: every family has a verdict, whatever its process does; the page says what the results say."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from instep.bench.kept import MODELS
from instep.bench.models import build, page
from instep.bench.models.families import FAMILIES, KINDS, kind
from instep.bench.models.matrix import run
from instep.bench.models.outcome import Matrix, Outcome, Setting
from instep.bench.models.worker import FamilyWorker

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results"
PIDS = "PIDS_OF_THIS_TEST"


def outcome(family: str, **other: Any) -> Outcome:
    return Outcome(**{"family": family, "kind": kind(family), "verdict": "bit-equal"} | other)


def matrix(*outcomes: Outcome, vllm: str = "1.0") -> Matrix:
    setting = Setting(kind="cpu", machine=["a CPU"], versions={"vllm": vllm}, date="2001-02-03", command="python")
    return Matrix(setting=setting, outcomes=list(outcomes))


def answers(name: str, folder: Path, gpu: int | None) -> None:
    if name == "llama":
        (folder / "outcome.json").write_bytes(msgspec.json.encode(outcome(name)))
    if name == "gemma":
        raise RuntimeError("no room")
    if name == "mamba":
        child = subprocess.Popen(["sleep", "600"])
        Path(os.environ[PIDS]).write_text(str(child.pid))
        time.sleep(600)


def test_every_family_gets_a_verdict_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answers, one fails, and one hangs with a process of its own."""
    monkeypatch.setenv(PIDS, str(tmp_path / "pid"))
    told: list[str] = []
    found = run(
        ["llama", "gemma", "mamba"],
        jobs=3,
        deadline=20.0,
        tell=lambda one: told.append(one.family),
        work=answers,
        context=multiprocessing.get_context("fork"),
    )
    assert [(one.family, one.verdict) for one in found] == [
        ("llama", "bit-equal"),
        ("gemma", "ended"),
        ("mamba", "out of time"),
    ]
    assert sorted(told) == ["gemma", "llama", "mamba"]
    assert "RuntimeError: no room" in found[1].why
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    until = time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < until, "the child of a family goes on"
        time.sleep(0.05)


def test_a_run_of_some_families_keeps_what_was_found_of_others_with_the_same_versions(
    tmp_path: Path,
) -> None:
    file = matrix(outcome("llama"), outcome("gemma")).write(tmp_path)
    matrix(outcome("gemma", verdict="refused")).write(tmp_path)
    read = msgspec.json.decode(file.read_bytes(), type=Matrix)
    assert {one.family: one.verdict for one in read.outcomes} == {
        "llama": "bit-equal",
        "gemma": "refused",
    }
    matrix(outcome("gemma"), vllm="2.0").write(tmp_path)
    assert [one.family for one in msgspec.json.decode(file.read_bytes(), type=Matrix).outcomes] == ["gemma"]


def test_the_page_of_families_is_what_make_benchmarks_writes() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == page.text(RESULTS), "run `make benchmarks`"


def test_every_family_of_the_configurations_is_in_the_kept_results() -> None:
    for file in RESULTS.glob(MODELS):
        assert {one.family for one in msgspec.json.decode(file.read_bytes(), type=Matrix).outcomes} == FAMILIES.keys(), file


def test_the_page_names_the_reason_of_every_family_that_is_not_bit_equal() -> None:
    text = page.page(
        [
            matrix(
                outcome("llama", pushes=[0.5, 0.25], verified=3, unread=1),
                outcome("gemma", verdict="refused", why="no | place"),
            )
        ]
    )
    assert "2 families: 1 bit-equal, 1 refused" in " ".join(text.split())
    assert "| llama | – | 0 / 0 / 0 | 500 ms | 250 ms | 3 of 4 | bit-equal |" in text
    assert "| gemma | refused | no \\| place |" in text


def test_no_two_kinds_have_a_family_of_the_same_name() -> None:
    assert sum(map(len, KINDS.values())) == len(FAMILIES)


@pytest.mark.parametrize("name", ["qwen2", "deepseek-v3", "qwen3-next"])
def test_models_of_a_family_differ_by_their_seed_in_every_tensor(name: str) -> None:
    one, again, other = (build.model(name, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(value, again[key]) for key, value in one.items())
    assert [key for key, value in one.items() if torch.equal(value, other[key])] == []


def test_the_digests_of_a_worker_cover_buffers_and_plain_attributes_but_no_cache() -> None:
    class Worker(FamilyWorker):
        def get_model(self) -> torch.nn.Module:
            layer = torch.nn.BatchNorm1d(2)
            layer.absorbed, layer.kv_cache = torch.ones(2, 0), torch.zeros(3)
            return torch.nn.Sequential(layer)

    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked", "absorbed"}
    assert Worker().live_digests().keys() == {f"0.{name}" for name in names}
