"""The benchmark's ways, run for real on an engine in memory: each must end with the trainer's weights in it, or it is no way."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep import bench
from instep.bench import kept, sharded, stages
from instep.bench.contenders import ON_CPU
from instep.bench.report import tables

pytestmark = pytest.mark.program


@pytest.fixture(scope="module")
def results() -> bench.Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "find_spec", lambda name: None)  # as where vLLM is not installed
        patch.setattr("torch.cuda.is_available", lambda: False)
        return bench.run("tiny", repeats=1)


@pytest.mark.parametrize("way", [way.name for way in ON_CPU])
def test_a_way_brings_the_weights_into_the_engine(results: bench.Results, way: str) -> None:
    (row,) = [row for row in results.rows if row.way == way]
    assert row.error is None
    assert row.gap == 0.0  # every bit of every weight and derived tensor: see `MemorySubject`
    assert len(row.runs) == 1


def test_the_limits_and_the_methods_to_copy_are_there(results: bench.Results) -> None:
    assert results.notes == []
    assert results.calls["memory"].keys() == {"nothing", "pause", "resume"}
    assert {limit.name for limit in results.limits} == {"memory copy", "Gloo broadcast"}
    assert [(copy.method, copy.error) for copy in results.copies] == [("loop of copy_", None), ("torch._foreach_copy_", None)]


def test_the_results_are_written(results: bench.Results, tmp_path: Path) -> None:
    file = bench.write(results, tmp_path / "new")
    assert file.name == "cpu-tiny.json"
    assert '"way": "instep shm"' in file.read_text()
    assert tables(results).count("failed") == 0


def test_an_engine_that_does_not_start_costs_its_rows_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trainer: object) -> None:
        raise RuntimeError("no room for it")

    monkeypatch.setattr(stages, "find_spec", lambda name: None)
    monkeypatch.setattr(stages, "MemorySubject", broken)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = bench.run("tiny", repeats=1)
    assert [row.error for row in found.rows] == ["RuntimeError: no room for it"] * len(ON_CPU)
    assert found.notes == ["engine on memory: RuntimeError: no room for it"]
    assert [copy.error for copy in found.copies] == [None, None]


def test_pushes_from_ranks_are_measured_and_written_as_the_page_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sharded, "SIZES", (2,))
    sharded.main(["--shapes", "tiny", "--repeats", "1", "--out", str(tmp_path)])
    (found,) = kept.read(tmp_path).values()
    assert isinstance(found, kept.Sharded)
    first, second = found.ranks["2"]
    assert first.keys() == second.keys() == sharded.SETTINGS.keys()
    assert all(rank.given > 0 for ranks in (first, second) for rank in ranks.values())
    (read,) = {rank.read for rank in first.values()}
    assert read >= found.setting.nbytes
    assert next(iter(first)) in capsys.readouterr().out
