"""What counts as measured: a way whose engine has the trainer's weights afterwards, and no other. Every failure is a row."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from instep.bench import measure
from instep.bench.measure import Bench, Push, Way
from instep.bench.subjects import stop_vllm
from instep.bench.waits import bounded
from instep.errors import ConfigError


class FakeTrainer:
    """Its weights are one number, which a step negates."""

    def __init__(self) -> None:
        self.steps, self.weights = 0, 1

    def step(self) -> None:
        self.steps += 1
        self.weights = -self.weights


class FakeSubject:
    name = "fake"

    def __init__(self) -> None:
        self.engine: Any = None
        self.weights, self.precision, self.calls = 5, 0, list[str]()

    def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        return 1

    def look(self, trainer: FakeTrainer) -> tuple[float, Hashable]:
        return abs(self.weights - trainer.weights), (self.weights, self.precision)


def way(act: Callable[[FakeTrainer, FakeSubject, int], object], name: str = "way") -> Way:
    """act: takes the number of the push, and returns the phases that it tells of."""

    @contextmanager
    def opened(trainer: Any, subject: Any) -> Iterator[Push]:
        pushes = 0

        def push() -> dict[str, float]:
            nonlocal pushes
            pushes += 1
            told = act(trainer, subject, pushes)
            return {"pause": 0.001} | (told if isinstance(told, dict) else {})

        yield push
        subject.calls.append("closed")

    return Way(name, opened, "limit", "rival")


def right(trainer: FakeTrainer, subject: FakeSubject, _: int) -> None:
    subject.weights = trainer.weights


def timed(trainer: FakeTrainer, subject: FakeSubject, _: int) -> dict[str, float]:
    subject.weights = trainer.weights
    return {"total": 7.0}


def exact(trainer: FakeTrainer, subject: FakeSubject, _: int) -> None:
    subject.weights, subject.precision = trainer.weights, 0


@pytest.fixture
def bench() -> Any:
    trainer: Any = FakeTrainer()
    subject: Any = FakeSubject()
    return Bench(trainer, subject, repeats=4)


def test_a_way_that_brings_the_weights_is_a_row_with_its_runs(bench: Any) -> None:
    row = bench.measure(way(right))
    assert row.error is None
    assert (row.way, row.engine, row.limit, row.rival, row.gap) == ("way", "fake", "limit", "rival", 0.0)
    assert len(row.runs) == 4
    assert all(run["total"] >= 0 and run["pause"] == 0.001 for run in row.runs)
    assert row.memory.keys() == row.cold_memory.keys() != set()
    assert bench.subject.calls[-1] == "closed"


def test_a_way_may_tell_its_own_total(bench: Any) -> None:
    assert bench.measure(way(timed)).medians["total"] == 7.0


def test_every_way_is_judged_with_the_trainers_first_weights(bench: Any) -> None:
    for repeats in (1, 2):
        bench.repeats = repeats
        assert bench.measure(way(right)).error is None
        assert bench.trainer.weights == 1


def test_a_copy_that_did_not_happen_is_an_error_and_no_numbers(bench: Any) -> None:
    row = bench.measure(way(lambda *_: None))
    assert "does not compute what the trainer computes" in str(row.error)
    assert row.runs == []


def test_a_way_that_stops_copying_is_seen(bench: Any) -> None:
    assert "NotProved" in str(bench.measure(way(lambda t, s, n: right(t, s, n) if n < 8 else None)).error)


def test_an_engine_that_has_the_weights_before_the_push_proves_nothing(bench: Any) -> None:
    bench.subject.look = lambda trainer: (0.0, 1)
    assert "nothing can be told" in str(bench.measure(way(right)).error)


def test_outputs_that_are_not_numbers_prove_nothing(bench: Any) -> None:
    gaps = iter([3.0, math.nan])
    bench.subject.look = lambda trainer: (next(gaps), 1)
    assert "NotProved" in str(bench.measure(way(right)).error)


def test_two_ways_that_bring_the_same_weights_must_make_the_same_engine(bench: Any) -> None:
    """A layer that stays stale may move the outputs less than rounding does, but it does move them."""

    def nearly(trainer: FakeTrainer, subject: FakeSubject, _: int) -> None:
        subject.weights, subject.precision = trainer.weights, 1

    assert bench.measure(way(right, "first")).error is None
    assert "not what first made of it" in str(bench.measure(way(nearly)).error)
    assert bench.measure(way(exact)).error is None


def test_a_way_that_fails_is_closed_and_the_next_one_is_measured(bench: Any) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("it cannot", next_step="do not")

    row = bench.measure(way(fail))
    assert (row.error, row.runs) == ("ConfigError: it cannot", [])
    assert bench.subject.calls[-1] == "closed"
    assert bench.measure(way(right)).error is None


def test_after_a_push_that_hangs_the_engine_is_left_alone(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "bounded", lambda what, call, seconds=2: bounded(what, call, 2))
    released = threading.Event()
    row = bench.measure(way(lambda *_: released.wait(), "stuck"))
    assert row.error == "Late: a push did not end within 2 s"
    assert "the engine was lost: stuck: a push did not end" in str(bench.measure(way(right)).error)
    released.set()


class NoSuchProcess(Exception):
    """As psutil's, of which vLLM may find one of two copies."""


class Ending:
    """What `stop_vllm` sees of an `LLM` whose shutdown raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.done: list[str] = []
        self.llm_engine = self.engine_core = self.engine_manager = self.resources = self
        self.processes = [self, self]

    def shutdown(self) -> None:
        raise self.error

    def kill(self) -> None:
        self.done.append("kill")

    def __call__(self) -> None:
        self.done.append("resources")


def test_an_engine_ends_whole_where_vllm_fails_over_a_child_that_has_just_ended() -> None:
    ending = Ending(NoSuchProcess("process no longer exists"))
    stop_vllm(ending)
    assert ending.done == ["kill", "kill", "resources"]
    with pytest.raises(RuntimeError, match="something else"):
        stop_vllm(Ending(RuntimeError("something else")))
