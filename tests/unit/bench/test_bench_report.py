"""From what was measured to the table and the JSON, with numbers made up here."""

from __future__ import annotations

import json

import pytest

from instep.bench.report import as_json, rate, size, tables, time
from instep.bench.results import Copy, Limit, Results, Row, Setting, summarize

SETTING = Setting(
    kind="gpu", shapes="made-up", nbytes=10_000_000_000, tensors=12, repeats=3, machine=["2 x Card", "driver 1.2"],
    versions={"torch": "9.9"}, date="2001-02-03", command="instep bench",
)  # fmt: skip


def runs(*totals: float) -> list[dict[str, float]]:
    return [{"total": total, "pause": total / 2} for total in totals]


def results(*rows: Row, limits: list[Limit] | None = None, copies: list[Copy] | None = None) -> Results:
    return Results(setting=SETTING, limits=limits or [], rows=list(rows), copies=copies or [], notes=["a note"])


OURS = Row(
    way="ours", engine="GPU 1", limit="peer copy", rival="theirs", runs=runs(0.05, 0.04, 9.0), cold=1.5,
    memory={"GPU 0": 0, "GPU 1": 2_000_000}, cold_memory={"GPU 0": 5_000, "GPU 1": 3_000_000_000}, gap=0.01,
)  # fmt: skip
THEIRS = Row(way="theirs", engine="GPU 1", limit="peer copy", runs=runs(0.2, 0.1, 0.3))
BROKEN = Row(way="broken", engine="GPU 1", limit="peer copy", rival="theirs", error="ValueError: too | large\nby far")
PEER = [
    Limit(name="peer copy", engine="GPU 1", nbytes=1_000_000, seconds=[1e-6] * 3),  # faster than any large message
    Limit(name="peer copy", engine="GPU 1", nbytes=1_000_000_000, seconds=[0.0025, 0.0025, 0.5]),
    Limit(name="peer copy", engine="GPU 0", nbytes=2_000_000_000, seconds=[0.001]),
]


def test_medians_are_of_each_phase() -> None:
    row = Row(way="w", engine="e", runs=[{"total": 3.0, "pause": 1.0}, {"total": 1.0, "pause": 5.0}, {"total": 2.0, "pause": 2.0}])
    assert row.medians == {"total": 2.0, "pause": 2.0}
    assert BROKEN.medians == {}


def test_a_total_is_compared_with_the_rate_of_the_largest_message_to_the_same_engine_and_with_its_rival() -> None:
    ours, theirs, broken = summarize(results(OURS, THEIRS, BROKEN, limits=PEER))
    assert ours.of_limit == pytest.approx(0.05 / (10 * 0.0025))
    assert ours.rival_over_this == pytest.approx(0.2 / 0.05)
    assert theirs.of_limit == pytest.approx(0.2 / (10 * 0.0025))
    assert theirs.rival_over_this is None
    assert (broken.medians, broken.of_limit, broken.rival_over_this) == ({}, None, None)


def test_a_rival_on_another_engine_or_one_that_failed_is_none() -> None:
    elsewhere = Row(way="theirs", engine="GPU 0", runs=runs(0.2))
    assert summarize(results(OURS, elsewhere))[0].rival_over_this is None
    assert summarize(results(OURS, Row(way="theirs", engine="GPU 1", error="no")))[0].rival_over_this is None
    assert summarize(results(OURS))[0].of_limit is None


def test_the_tables() -> None:
    copies = [
        Copy(method="loop", to="cuda:1", regions=7, nbytes=10_000_000_000, seconds=[0.05, 0.04, 0.06]),
        Copy(method="kernel", to="cuda:1", regions=7, nbytes=10_000_000_000, error="RuntimeError: no"),
    ]
    lines = tables(results(OURS, BROKEN, THEIRS, limits=PEER, copies=copies)).splitlines()
    assert lines[0] == (
        "made-up, 10.00 GB in 12 tensors; 2 x Card, driver 1.2; torch 9.9; 2001-02-03; `instep bench`; medians of 3"
    )  # fmt: skip
    assert "| ours | GPU 1 | 50 ms | 25 ms | 2.00 | 4.00 | 1500 ms | GPU 0 0 kB (5 kB), GPU 1 2 MB (3.00 GB) |" in lines
    assert "| broken | GPU 1 | failed: ValueError: too / large by far | – | – | – | – | – |" in lines
    assert "| theirs | GPU 1 | 200 ms | 100 ms | 8.00 | – | – | – |" in lines
    assert "| peer copy | GPU 1 | 1.00 GB | 400 GB/s | 25 ms |" in lines
    assert "| loop | cuda:1 | 7 | 50 ms | 200 GB/s |" in lines
    assert "| kernel | cuda:1 | 7 | failed: RuntimeError: no | – |" in lines
    assert lines[-1] == "a note"


def test_long_errors_are_cut_in_the_table_and_whole_in_the_json() -> None:
    row = Row(way="w", engine="e", error="x" * 5000)
    assert len(tables(results(row))) < 1000
    assert json.loads(as_json(results(row)))["rows"][0]["error"] == row.error


def test_the_json_has_what_was_measured_and_what_follows() -> None:
    found = json.loads(as_json(results(OURS, THEIRS, limits=PEER)))
    assert found["setting"]["machine"] == ["2 x Card", "driver 1.2"]
    assert found["rows"][0]["runs"] == OURS.runs
    assert found["rows"][0]["cold"] == 1.5
    assert found["summaries"][0]["medians"] == {"total": 0.05, "pause": 0.025}
    assert found["summaries"][0]["rival_over_this"] == pytest.approx(4.0)


def test_numbers_in_words() -> None:
    assert [time(0.0004567), time(0.01234), time(0.1), time(1.9442), time(18.44)] == ["0.457 ms", "12.3 ms", "100 ms", "1944 ms", "18.4 s"]
    assert [size(0), size(1536), size(2.5e6), size(16_381_470_720)] == ["0 kB", "2 kB", "2 MB", "16.38 GB"]
    assert [rate(395.4e9), rate(8.25e9), rate(2.139e12)] == ["395 GB/s", "8.25 GB/s", "2139 GB/s"]
