"""What callers of the worker extensions hear of a failure: also those who look at no answer, and trainers who wait in a broadcast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.rlhf_workers import Engine
from helpers.toys import attention

from instep.dropin import meeting
from instep.dropin.answers import in_thread
from instep.dropin.calls import state_in
from instep.dropin.vllm_rlhf import Communicator
from instep.errors import TransportError

pytestmark = pytest.mark.timeout(60)
NAMES = list(attention(1))


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


@pytest.fixture
def group(engine: Engine) -> Iterator[Communicator]:
    with engine.joined() as made:
        yield made


def update(engine: Engine, group: Communicator, weights: dict[str, torch.Tensor]) -> Any:
    """The examples' loop, whose caller looks at no answer."""
    for name, p in weights.items():
        handle = engine.starts("update_weight", name, str(p.dtype).removeprefix("torch."), p.shape)
        group.broadcast(p, src=0, stream=None)
        answer = handle.result(20)
    return answer


def in_step(engine: Engine) -> bool:
    """Whether no worker is a reply behind."""
    return [status["rank"] for status in engine.call("instep_status")] == list(range(len(engine.workers)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_fails_is_heard_of_by_a_caller_that_looks_at_no_answer(rank: int) -> None:
    engine = Engine(2)
    with engine.joined() as group:
        update(engine, group, attention(2))
        engine.memory.hosts[rank].fail_at = 2
        with pytest.raises(RuntimeError, match=f"rank {rank}: .*told to fail.*; the engine holds parts of two versions") as failure:
            update(engine, group, attention(3))
        assert state_in(str(failure.value)) == ("dirty", None)
        assert in_step(engine)
        engine.memory.hosts[rank].fail_at = None
        update(engine, group, attention(3))
        assert engine.serves(3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [NAMES[0], NAMES[2], NAMES[-1], "surprise"])
def test_a_worker_that_fails_alone_takes_the_others_along(rank: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in one round with it for the next update: nobody waits for the others there."""
    engine = Engine(2)
    with engine.joined() as group:
        update(engine, group, attention(2))
        rounds = vars(engine.workers[rank])["instep_rounds"]
        keep, left = rounds._keep, [name]

        def fail_once(given: str, *args: Any) -> None:
            if given in left:
                left.remove(given)
                raise OSError("no memory")
            keep(given, *args)

        monkeypatch.setattr(rounds, "_keep", fail_once)
        monkeypatch.setattr(vars(engine.workers[1 - rank])["instep_rounds"], "_end_seen", lambda: None)
        handle = engine.starts("update_weight", name, "bfloat16", attention(3).get(name, torch.ones(3)).shape)
        group.broadcast(attention(3).get(name, torch.ones(3, dtype=torch.bfloat16)))
        with pytest.raises(RuntimeError, match="no memory"):
            handle.result(20)
        monkeypatch.undo()
        started = time.monotonic()
        update(engine, group, attention(4))
        assert time.monotonic() - started < 10
        assert engine.serves(4)


def test_what_all_workers_refuse_is_raised_once(engine: Engine, group: Communicator) -> None:
    update(engine, group, attention(2))
    handle = engine.starts("update_weight", "surprise", "bfloat16", [3])
    group.broadcast(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(Exception, match="surprise") as failure:
        handle.result(20)
    assert state_in(str(failure.value)) == ("old", "round-2")
    assert in_step(engine)
    assert engine.serves(2)


@pytest.mark.parametrize("arguments", [(NAMES[0], "bfloat17", [2]), (NAMES[0], torch.bfloat16, ["two"]), (NAMES[0],), ()], ids=str)
def test_what_a_worker_refuses_leaves_no_trainer_in_its_broadcast(engine: Engine, group: Communicator, arguments: tuple[Any, ...]) -> None:
    """The worker takes part, raises, and is in step for the next update."""
    update(engine, group, attention(2))
    handle = engine.starts("update_weight", *arguments)
    started = time.monotonic()
    group.broadcast(attention(3)[NAMES[0]])
    with pytest.raises(Exception, match=r"bfloat17|two|argument"):
        handle.result(20)
    assert time.monotonic() - started < 10
    assert in_step(engine)
    assert engine.serves(2)
    update(engine, group, attention(3))
    assert engine.serves(3)


def test_a_worker_that_cannot_even_begin_leaves_no_trainer_in_its_broadcast(engine: Engine) -> None:
    with engine.joined() as group:
        for worker in engine.workers:
            del vars(worker)["instep_rounds"]
            vars(worker)["instep_receiver"] = None
        handle = engine.starts("update_weight", NAMES[0], "bfloat16", attention(3)[NAMES[0]].shape)
        group.broadcast(attention(3)[NAMES[0]])
        with pytest.raises(Exception, match="NoneType"):
            handle.result(20)


def test_a_dtype_may_be_a_dtype(engine: Engine, group: Communicator) -> None:
    for name, p in attention(2).items():
        handle = engine.starts("update_weight", name, p.dtype, p.shape)
        group.broadcast(p)
        handle.result(20)
    assert engine.serves(2)


def alone(engine: Engine, group: Communicator, timeout: float) -> float:
    """A broadcast without a call of `update_weight`. How long it waited."""
    before, group.timeout = group.timeout, timeout
    started = time.monotonic()
    with pytest.raises(TransportError, match="nothing was sent: ") as failure:
        group.broadcast(attention(3)[NAMES[0]])
    assert failure.value.next_step == "the group is in order: mend the call, and send all weights again"
    group.timeout = before
    return time.monotonic() - started


def test_a_broadcast_without_a_call_is_an_error_and_the_same_group_brings_the_next_update(engine: Engine, group: Communicator) -> None:
    alone(engine, group, 1)
    for seed in (2, 3):
        update(engine, group, attention(seed))
        assert engine.serves(seed)
        alone(engine, group, 0.5)


def test_an_update_in_which_a_call_was_left_out_begins_again_from_its_first_tensor(engine: Engine, group: Communicator) -> None:
    """No call of the second try fails for what was left of the first."""
    for seed in (2, 3):
        update(engine, group, dict(list(attention(seed).items())[:3]))
        alone(engine, group, 0.5)
        update(engine, group, attention(seed))
        assert engine.serves(seed)


def test_a_late_call_is_waited_for(engine: Engine, group: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does nothing else is as good as one that works: its call may come at any time."""
    monkeypatch.setattr(meeting, "GRACE", 0.2)
    update(engine, group, attention(2))
    sending = in_thread(lambda: group.broadcast(attention(3)[NAMES[0]]))
    time.sleep(1.5)
    engine.call("update_weight", NAMES[0], "bfloat16", attention(3)[NAMES[0]].shape)
    sending.result(10)


def test_a_call_that_failed_on_its_way_ends_the_trainers_broadcast_early(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.5)
    with engine.joined(timeout=20) as group:
        update(engine, group, attention(2))
        engine.call("instep_call_failed", "it is not serializable")
        assert alone(engine, group, 15) < 10
        engine.call("instep_call_failed", "it was another call")
        update(engine, group, attention(3))
        assert engine.serves(3)


def test_bytes_of_a_broadcast_that_nobody_took_are_not_taken_for_the_next_one(engine: Engine, group: Communicator) -> None:
    """Gloo sends small tensors ahead: a sender would go on before anybody has come."""
    update(engine, group, attention(2))
    small = NAMES[-1]
    sending = in_thread(lambda: group.broadcast(attention(3)[small]))
    time.sleep(0.3)
    assert not sending.done()
    engine.call("update_weight", small, "bfloat16", attention(3)[small].shape)
    sending.result(10)


def test_weights_changed_where_the_last_update_is_in_place(engine: Engine, group: Communicator) -> None:
    """As the page asserts it, after all weights and after one; not of an update that was refused, or that brought the same bytes."""

    def changed() -> set[bool]:
        return set(engine.call("check_weights_changed"))

    assert changed() == {False}
    for seed, answer in ((2, True), (2, False), (3, True)):
        update(engine, group, attention(seed))
        assert changed() == {answer}
    update(engine, group, {NAMES[1]: attention(4)[NAMES[1]]})
    assert changed() == {True}
    handle = engine.starts("update_weight", NAMES[0], "bfloat17", [2])
    group.broadcast(torch.ones(2))
    with pytest.raises(Exception, match="bfloat17"):
        handle.result(20)
    assert changed() == {False}
    for _ in range(2):
        update(engine, group, {name: torch.zeros_like(p) for name, p in attention(2).items()})
        assert changed() == {True}
