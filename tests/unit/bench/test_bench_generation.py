"""Tokens a second: what is made of the runs, and pushes beside them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from instep.bench.generation import ACTOR, BARE, PUSHED, Rate, Rates, every, write
from instep.bench.results import Setting

SETTING = Setting(
    kind="cpu", shapes="tiny", nbytes=1, tensors=1, repeats=2, machine=["a CPU"], versions={}, date="2026-01-01", command="instep bench"
)  # fmt: skip


def rates() -> Rates:
    runs = [
        Rate(way=BARE, tokens=100, seconds=1.0), Rate(way=ACTOR, tokens=100, seconds=1.0),
        Rate(way=PUSHED["reset"], tokens=100, seconds=2.0, pushes=1, paused=0.5),
        Rate(way=BARE, tokens=100, seconds=2.0), Rate(way=ACTOR, tokens=100, seconds=2.5),
        Rate(way=PUSHED["reset"], tokens=100, seconds=4.0, pushes=1, paused=1.0),
    ]  # fmt: skip
    return Rates(setting=SETTING, requests=5, runs=runs)


def test_a_way_is_compared_with_the_bare_engine_of_its_own_round(tmp_path: Path) -> None:
    assert rates().rate(BARE) == 75.0
    assert rates().share(ACTOR) == pytest.approx(0.9)
    assert rates().share(PUSHED["reset"]) == 0.5
    head, *rows = rates().lines()
    assert "5 prompts of 4 samples" in head
    assert [row.split("tokens/s")[0].split()[-1] for row in rows] == ["75", "70", "38"]
    assert "paused 25.0 % of the time" in rows[-1]
    written = json.loads(write(rates(), tmp_path).read_text())
    assert written["summary"][ACTOR]["of_async_llm"] == pytest.approx(0.9)


def test_pushes_come_at_their_times_until_the_run_ends() -> None:
    calls: list[float] = []

    def push() -> float:
        calls.append(time.monotonic())
        return 0.5

    with every(0.02, push) as pauses:
        while len(calls) < 3:
            time.sleep(0.001)
    assert pauses == [0.5] * len(calls)
    done = len(calls)
    time.sleep(0.05)
    assert len(calls) == done


def test_a_push_that_fails_ends_the_run_with_its_error() -> None:
    def push() -> float:
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"), every(0.0, push):
        time.sleep(0.05)
