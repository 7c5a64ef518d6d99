"""What the demo prints, and that nobody else prints into it."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from instep.demo.record import Answer, Exam, Run, Step
from instep.demo.show import Show, terminal


def step(number: int, reward: float, gap: float | None = 2e-5) -> Step:
    seconds = {"connect": 0.001, "describe": 0.002, "plan": 0.003, "publish": 0.3, "prepare": 0.01, "commit": 0.5, "canary": 0.1}
    push = {
        "version": f"step-{number}",
        "nbytes": 538_060_032,
        "tensors": 272,
        "seconds": seconds | {"total": sum(seconds.values())},
        "digest": "00ff" * 4,
        "pause": 0.45,
        "canary_gap": gap,
    }
    return Step(number, [f"step-{number - 1}"], reward, [reward], 400, 4.0, 5.0, 0.1, push)


def exam(reward: float) -> Exam:
    return Exam(reward, [Answer("What is the capital of Chile?", "Santiago.", reward)])


def run(after: float, gap: float | None = 2e-5) -> Run:
    steps = [step(1, 0.25, gap), step(2, 0.75, gap)]
    return Run("a model", "an engine", "a CPU", {"instep": "0"}, 0, "1 if right", exam(0.2), exam(after), steps, {"total": 1.0})


def shown(width: int, *, is_terminal: bool) -> list[str]:
    out = io.StringIO()
    show = Show(Console(file=out, width=width, force_terminal=is_terminal, color_system=None))
    show.header()
    show.row(step(3, 0.5))
    return out.getvalue().splitlines()


def test_a_row_shows_reward_speed_phases_pause_bytes_version_digest_and_gap() -> None:
    header, row = shown(80, is_terminal=False)
    assert row.split() == ["step-3", "0.50", "█████·····", "100", "6", "300", "10", "500", "100", "916", "450", "538", "00ff" * 4, "2e-05"]
    columns = header.partition("(")[0]
    assert len(columns.split()) == len(row.split()) - 1  # the bar has no title
    assert columns.rstrip().endswith("gap")


def test_on_a_narrow_terminal_a_row_is_one_line() -> None:
    header, row = shown(80, is_terminal=True)
    assert len(row.rstrip()) <= 80
    assert row.split()[-1] == "2e-05"
    assert "digest" not in header


def test_colours_are_for_terminals_and_for_those_who_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(is_terminal: bool) -> str:
        out = io.StringIO()
        Show(Console(file=out, force_terminal=is_terminal, width=200)).row(step(1, 0.5))
        return out.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;32m" in printed(True)
    assert "\x1b" not in printed(False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in printed(True)


def test_the_verdict_says_what_happened() -> None:
    assert run(0.6).verdict().startswith("a model learned: reward 0.25 to 0.75 in 2 steps (0.20 to 0.60 on questions never trained on)")
    assert "538 MB in 916 ms, paused 450 ms" in run(0.6).verdict()
    assert run(0.6).verdict().endswith("canary gap at most 2e-05")


def test_the_verdict_admits_that_nothing_was_learned() -> None:
    assert run(0.2).verdict().startswith("a model did not learn")
    assert run(0.3).verdict().startswith("a model did not learn")  # chance does that
    assert "canary" not in run(0.2, gap=None).verdict()


def test_what_children_print_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "engine.log"
    with terminal(log, stderr=False) as console:
        subprocess.run("echo from a worker; echo to its stderr >&2", shell=True, check=True)
        os.write(2, b"from this process\n")
        console.print("for the user")
    os.write(1, b"afterwards\n")
    assert capfd.readouterr().out == "for the user\nafterwards\n"
    assert log.read_text().splitlines() == ["from a worker", "to its stderr", "from this process"]


def test_what_a_library_prints_does_not_get_into_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    with Show(Console(file=screen, force_terminal=True)) as show:
        show.doing("starting")
        print("a warning of a library")
    assert "a warning" not in screen.getvalue()
    assert "a warning" in capfd.readouterr().out
    assert "starting" in screen.getvalue()


def test_with_json_the_table_goes_to_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with terminal(tmp_path / "engine.log", stderr=True) as console:
        console.print("for the user")
    assert capfd.readouterr() == ("", "for the user\n")
