"""`push`, `verify`, `status` and the metrics against a real `instep serve`, to which nobody has pushed yet: this is the first file
with `server`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from http_server import TOKEN, Server

from instep import cli

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Exit code and stdout of a command with the server's token."""
    monkeypatch.setenv("INSTEP_TOKEN", TOKEN)

    def command(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["instep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capfd.readouterr().out

    return command


def test_verify_push_status_and_metrics_tell_one_story(server: Server, checkpoints: Callable[[str, int], Path], run: Run) -> None:
    first, second = checkpoints("qwen3", 1), checkpoints("qwen3", 2)

    code, out = run("verify", first, "--engine", server.url, "--canary", "--json")
    (loaded,) = json.loads(out)["engines"]
    assert (code, loaded["result"], loaded["version"], loaded["differing"]) == (0, "equal", None, {}), out
    assert loaded["equal"] > 0
    assert all("layout of its own" in why for why in loaded["unread"].values())
    assert loaded["canary_gap"] < 0.1

    code, out = run("verify", second, "--engine", server.url, "--json")
    assert (code, json.loads(out)["engines"][0]["result"]) == (4, "differs")

    code, out = run("push", second, "--engine", server.url, "--version", "two", "--canary", "--json")
    receipt = json.loads(out)
    assert (code, receipt["version"], receipt["transport"]) == (0, "two", "shm")
    assert receipt["canary_gap"] < 0.1

    code, out = run("verify", second, "--engine", server.url, "--canary", "--json")
    (pushed,) = json.loads(out)["engines"]
    assert (code, pushed["result"], pushed["version"]) == (0, "equal", "two"), out
    assert pushed["equal"] == loaded["equal"]

    code, out = run("verify", second, "--engine", server.url, "--json")
    (alone,) = json.loads(out)["engines"]
    assert (code, alone["result"]) == ((5, "not all compared") if alone["unread"] else (0, "equal"))
    assert (alone["share"] < 1) == bool(alone["unread"])

    code, out = run("status", server.url, "--json")
    (row,) = json.loads(out)["engines"]
    assert (code, row["version"], row["state"], row["lag"]) == (0, "two", "serving", 0)
    assert 0 < row["last_pause"] <= receipt["pause"]

    metrics = metric_lines(server)
    assert metrics['instep_syncs_total{outcome="ok"}'] == 1
    assert metrics['instep_sync_bytes_total{transport="shm"}'] == receipt["nbytes"]
    assert metrics['instep_sync_duration_seconds_count{phase="commit"}'] == 1
    assert metrics["instep_digest_mismatches_total"] == 0
    (lag,) = (value for name, value in metrics.items() if name.startswith("instep_version_lag"))
    (pauses,) = (value for name, value in metrics.items() if name.startswith("instep_pause_seconds_count"))
    assert (lag, pauses) == (0, 1)


def metric_lines(server: Server) -> dict[str, float]:
    code, text = server.get("/metrics")
    assert code == 200
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("instep_"))
    return {name: float(value) for name, _, value in lines}
