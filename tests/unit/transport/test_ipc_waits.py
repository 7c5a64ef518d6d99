"""When engines are paused for a push over CUDA IPC: not before the trainer's own sums are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.pretend_cuda import pretend
from helpers.toys import checkpoint

from instep import MemoryEngine, WeightSync
from instep.transport.ipc import export, publish

Seen = list[str]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, segments: Any) -> Seen:
    pretend(monkeypatch)
    return []


def looked_at(seen: Seen, answers: Iterator[bool], otherwise: bool) -> Callable[[Any], Callable[[], bool]]:
    def look() -> bool:
        seen.append("look")
        return next(answers, otherwise)

    return lambda _: look


def pushed(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MemoryEngine(checkpoint(0))
    pause = engine.pause

    async def paused(caches: Any) -> None:
        seen.append("pause")
        await pause(caches)

    monkeypatch.setattr(engine, "pause", paused)
    with WeightSync(weights := checkpoint(1), [engine]) as sync:
        sync.push("a")
        assert engine.fingerprint() == MemoryEngine(weights).fingerprint()


def test_an_engine_is_paused_when_the_sums_are_complete(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "mark", looked_at(seen, iter([False, False, False]), True))
    pushed(seen, monkeypatch)
    assert seen == ["look"] * 4 + ["pause"]


def test_a_worker_waits_with_its_deadline_where_they_do_not_come_soon(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "mark", looked_at(seen, iter(()), False))
    monkeypatch.setattr(publish, "PATIENCE", 0.01)
    pushed(seen, monkeypatch)
    assert seen[-1] == "pause"
    assert {*seen[:-1]} == {"look"}
