"""What a push tells while it runs, and what the sinks make of it."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.toys import checkpoint
from prometheus_client import CollectorRegistry

from instep import MemoryEngine, WeightSync
from instep.errors import DigestMismatch, EngineLost, PlanError
from instep.telemetry import Event, progress_bar, prometheus, scalars

pytestmark = pytest.mark.usefixtures("segments")

START, NEXT = checkpoint(0, layers=1), checkpoint(1, layers=1)


def test_the_events_of_a_push() -> None:
    events: list[Event] = []
    with WeightSync(NEXT, [MemoryEngine(START)], sinks=[events.append]) as sync:
        receipt = sync.push("v1")
    phases = [event.phase for event in events if event.kind == "phase"]
    assert phases == ["describe", "connect", "plan", "publish", "prepare", "commit"]
    assert receipt.seconds.keys() == {*phases, "total"}
    copied = [(event.nbytes, event.total) for event in events if event.kind == "bytes"]
    assert [nbytes for nbytes, _ in copied] == sorted(nbytes for nbytes, _ in copied)
    assert copied[-1] == (receipt.nbytes, receipt.nbytes)
    assert {total for _, total in copied} == {receipt.nbytes}
    assert {event.version for event in events} == {"v1"}
    assert (events[-1].kind, events[-1].receipt) == ("done", receipt)
    assert sum(event.kind == "done" for event in events) == 1


def test_bytes_are_told_too_where_no_tensor_is_asked_for() -> None:
    """A later version is copied from where the last one lay."""
    events: list[Event] = []
    with WeightSync(dict(NEXT), [MemoryEngine(START)], sinks=[events.append], transport="shm") as sync:
        for version in ("v1", "v2", "v3"):
            events.clear()
            receipt = sync.push(version)
            copied = [(event.nbytes, event.total) for event in events if event.kind == "bytes"]
            assert copied[-1] == (receipt.nbytes, receipt.nbytes)


def test_the_end_of_a_push_that_failed() -> None:
    events: list[Event] = []
    source = {"w": NEXT["model.norm.weight"]}
    with WeightSync(source, [MemoryEngine(START)], sinks=[events.append]) as sync, pytest.raises(PlanError) as caught:
        sync.push("v1")
    assert (events[-1].kind, events[-1].error) == ("failed", caught.value)


def test_the_log_is_always_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = MemoryEngine(START)
    with caplog.at_level(logging.INFO, "instep"), WeightSync(NEXT, [engine]) as sync:
        receipt = sync.push("v1")
        engine.inject("prepare")
        with pytest.raises(EngineLost):
            sync.push("v2")
    said = {record.getMessage(): record.levelname for record in caplog.records if record.name == "instep"}
    assert said[str(receipt)] == "INFO"
    (failure,) = [message for message, level in said.items() if level == "WARNING" and message.startswith("push of")]
    assert "push of v2 failed: memory was told to fail at prepare" in failure
    assert "does not answer; it served v1" in failure


ALONE = """
import logging
from helpers.toys import checkpoint
from instep import MemoryEngine, WeightSync
engine = MemoryEngine(checkpoint(0, layers=1))
engine.inject("prepare")
with WeightSync(checkpoint(1, layers=1), [engine]) as sync:
    sync.push("v1")
"""


@pytest.mark.parametrize("configured", [False, True])
def test_a_program_without_logging_is_told_of_a_failure_once(configured: bool) -> None:
    """By the error that it gets: Python prints warnings that nobody handles, and would print this one as well."""
    program = ALONE.replace("import logging", "import logging; logging.basicConfig()") if configured else ALONE
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("memory was told to fail at prepare\n") == 1 + configured, done.stderr


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_prometheus_counts_into_the_registry_it_is_given() -> None:
    registry = CollectorRegistry()
    good, bad = MemoryEngine(START, name="good"), MemoryEngine(START, name="bad")
    source = dict(NEXT)
    with WeightSync(source, [good, bad], require="any", sinks=[prometheus(registry)]) as sync:
        nbytes = sync.push("v1").nbytes
        bad.inject("prepare")
        sync.push("v2")
        for engine in (good, bad):
            engine.inject("digest")
        with pytest.raises(DigestMismatch):
            sync.push("v3")
        source.pop("model.norm.weight")
        with pytest.raises(PlanError):
            sync.push("v4")
    for outcome in ("ok", "partial", "DigestMismatch", "PlanError"):
        assert sample(registry, "instep_syncs_total", outcome=outcome) == 1
    assert sample(registry, "instep_sync_bytes_total", transport="shm") == 3 * nbytes
    assert sample(registry, "instep_digest_mismatches_total") == 1
    assert sample(registry, "instep_sync_duration_seconds_count", phase="total") == 2
    assert sample(registry, "instep_pause_seconds_count", engine="good") == 2
    assert sample(registry, "instep_pause_seconds_count", engine="bad") == 1
    assert sample(registry, "instep_version_lag", engine="good") == 2  # of v3 and v4
    assert sample(registry, "instep_version_lag", engine="bad") == 3


def test_two_sinks_may_count_into_one_registry() -> None:
    registry = CollectorRegistry()
    for name in ("one", "two"):
        with WeightSync(NEXT, [MemoryEngine(START, name=name)], sinks=[prometheus(registry)]) as sync:
            sync.push("v1")
    assert sample(registry, "instep_syncs_total", outcome="ok") == 2


def test_scalars_are_the_numbers_of_a_push_that_ended() -> None:
    events: list[Event] = []
    engine = MemoryEngine(START)
    with WeightSync(NEXT, [engine], sinks=[events.append]) as sync:
        receipt = sync.push("v1")
        engine.inject("prepare")
        with pytest.raises(EngineLost):
            sync.push("v2")
    done, failed = (scalars(event) for event in events if event.kind in ("done", "failed"))
    assert done["instep/bytes"] == receipt.nbytes
    assert done["instep/pause"] == receipt.pause
    assert done["instep/seconds/commit"] == receipt.seconds["commit"]
    assert (done["instep/engines"], done["instep/failed"]) == (1, 0)
    assert failed == {"instep/failed": 1.0}
    assert all(scalars(event) == {} for event in events if event.kind in ("phase", "bytes"))


def test_two_registries_do_not_meet() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    with WeightSync(NEXT, [MemoryEngine(START)], sinks=[prometheus(first), prometheus(second)]) as sync:
        sync.push("v1")
    assert sample(first, "instep_syncs_total", outcome="ok") == sample(second, "instep_syncs_total", outcome="ok") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_the_progress_bar_is_for_terminals(terminal: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    stream: Any = Terminal() if terminal else io.StringIO()
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    source = dict(NEXT)
    with WeightSync(source, [MemoryEngine(START)], sinks=[progress_bar()]) as sync:
        sync.push("v1")
        source.pop("model.norm.weight")
        with pytest.raises(PlanError):
            sync.push("v2")
    assert ("v1 " in stream.getvalue()) == terminal
    if not terminal:
        assert stream.getvalue() == ""
    assert capfd.readouterr().out == ""


def test_a_sink_that_fails_does_not_end_the_push(caplog: pytest.LogCaptureFixture) -> None:
    """Half way through a commit an engine would be left paused because of a broken dashboard."""

    def broken(event: Event) -> None:
        raise ValueError("the dashboard is down")

    engine = MemoryEngine(START)
    with WeightSync(NEXT, [engine], sinks=[broken]) as sync:
        assert sync.push("v1").version == "v1"
    assert not engine.paused
    assert "the dashboard is down" in caplog.text
