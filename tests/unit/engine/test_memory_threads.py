"""Which calls of an engine in memory take a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from instep import MemoryEngine, WeightSync
from instep.engine import memory
from instep.engine.gate import Gate


class Pool:
    """Notes the methods that a thread is asked for, and runs them at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self.asked.append(arguments[2])
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    made = Pool()
    monkeypatch.setattr(memory, "_threads", lambda: made)
    return made


def weights(count: int, size: int) -> dict[str, torch.Tensor]:
    return {f"model.layers.{index}.mlp.down_proj.weight": torch.randn(2, size // 8) for index in range(count)}


def later(pool: Pool, source: dict[str, torch.Tensor]) -> list[str]:
    """Pushes to two engines until they only copy, and returns the calls of the next push that take a thread."""
    engines = [MemoryEngine(source, name=name) for name in "ab"]
    with WeightSync(source, engines, transport="shm") as sync:
        for version in "vw":
            sync.push(version)
        pool.asked.clear()
        for tensor in source.values():
            tensor.add_(1)
        sync.push("x")
    assert [engine.fingerprint() for engine in engines] == 2 * [MemoryEngine(source).fingerprint()]
    return pool.asked


def test_small_versions_are_copied_without_a_thread(pool: Pool) -> None:
    assert later(pool, weights(3, 64)) == []


@pytest.mark.parametrize(("count", "size"), [(memory.FEW + 1, 64), (1, 4 << 20)], ids=["many tensors", "many bytes"])
def test_what_takes_longer_is_copied_in_a_thread(pool: Pool, count: int, size: int) -> None:
    assert set(later(pool, weights(count, size))) >= {"prepare", "commit"}


def test_an_engine_that_is_loading_has_a_thread(pool: Pool) -> None:
    """The first commit runs the engine's own loader, which may take any time."""
    source = weights(3, 64)
    with WeightSync(source, [MemoryEngine(source)], transport="shm") as sync:
        sync.push("v")
        assert pool.asked == ["trace", "decide", "commit"]


def test_a_forward_that_runs_on_keeps_a_commit_off_the_event_loop() -> None:
    gate, found = Gate(), []
    found.append(gate.empty)  # a forward may begin
    asyncio.run(gate.pause())
    found.append(gate.empty)
    with gate.passing("a", 1.0):  # of the thread that has paused
        found.append(gate.empty)
    gate.resume()
    found.append(gate.empty)
    assert found == [False, True, False, False]


def test_a_request_that_is_no_request_is_answered_by_the_worker(pool: Pool) -> None:
    assert not MemoryEngine(weights(1, 64))._at_once("prepare", b"\xc1")
    assert not pool.asked
