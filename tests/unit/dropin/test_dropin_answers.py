"""What a trainer makes of its engines' answers: every wait has an end, and every failure says what each engine serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.dropin import answers
from instep.dropin.answers import call, in_thread, meanwhile, settle
from instep.dropin.open_instruct import WorkerWrap, broadcast_weights_to_vllm, init_process_group
from instep.errors import ConfigError, EngineTimeout, SyncError, TransportError

GOOD = {"ok": True, "error": None, "rank": 0, "version": "round-1", "committed": True, "dirty": None}
BAD = {**GOOD, "ok": False, "error": "it did not fit", "committed": False, "version": None}


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(value) if isinstance(value, BaseException) else future.set_result(value)
    return future


def test_engines_are_ray_actors_objects_with_the_method_or_vllm() -> None:
    def update(name: str) -> str:
        return f"updated {name}"

    actor = SimpleNamespace(update_weight=SimpleNamespace(remote=lambda name: SimpleNamespace(future=lambda: done(update(name)))))
    local = SimpleNamespace(update_weight=update)
    llm = SimpleNamespace(collective_rpc=lambda method, kwargs: (method, kwargs))
    assert call(actor, "update_weight", name="a").result(5) == "updated a"
    assert call(local, "update_weight", name="a").result(5) == "updated a"
    assert call(llm, "update_weight", name="a").result(5) == ("update_weight", {"name": "a"})
    with pytest.raises(ConfigError, match="neither update_weight nor collective_rpc"):
        call(object(), "update_weight", name="a")


@pytest.mark.parametrize(
    ("answer", "serving", "text"),
    [
        ([GOOD, BAD], "new", "worker 0: it did not fit"),
        ([BAD], "old", "it did not fit"),
        ([{**BAD, "dirty": "half"}], "dirty", "it did not fit"),
        (RuntimeError("the actor died"), "unknown", "the actor died"),
        (None, "unknown", "answered None, no list of statuses"),
        ([], "unknown", "no list of statuses"),
        ([None], "unknown", "no list of statuses"),
    ],
)
def test_a_failure_says_what_every_engine_serves(answer: Any, serving: str, text: str) -> None:
    with pytest.raises(SyncError, match=text) as failure:
        settle([done([GOOD]), done(answer)], "update_weight of a", 5)
    assert [state.serving for state in failure.value.engines] == ["new", serving]


def test_an_engine_that_does_not_answer_is_not_waited_for() -> None:
    started = time.monotonic()
    with pytest.raises(EngineTimeout, match="no answer in time") as failure:
        settle([done([GOOD]), Future()], "update_weight of a", 0.2)
    assert time.monotonic() - started < 5
    assert [state.serving for state in failure.value.engines] == ["new", "unknown"]


class Slow:
    """A group whose collective ends when somebody gives up."""

    def __init__(self) -> None:
        self.reason: str | None = None

    @property
    def meeting(self) -> Slow:
        return self

    def call_off(self, reason: str) -> None:
        self.reason = reason

    def broadcast(self) -> None:
        end = time.monotonic() + 20
        while self.reason is None and time.monotonic() < end:
            time.sleep(0.01)
        raise TransportError(str(self.reason))


def test_an_engine_that_fails_ends_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "GRACE", 0.2)
    group: Any = Slow()
    with pytest.raises(TransportError, match="an engine failed: the actor died"):
        meanwhile(group, group.broadcast, [Future(), done(RuntimeError("the actor died"))])


def test_an_engine_that_took_part_before_it_failed_leaves_the_group_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "GRACE", 0.3)
    group: Any = Slow()
    meanwhile(group, lambda: time.sleep(0.1), [done(RuntimeError("it did not fit"))])
    time.sleep(0.5)
    assert group.reason is None


def test_a_call_in_a_thread_brings_what_it_raises() -> None:
    def fail() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        in_thread(fail).result(5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"init_method": "env://"}, "no address of a group"),
        ({"init_method": "tcp://host"}, "no address of a group"),
        ({"group_name": ""}, "all three are needed"),
        ({"rank": 2}, "all three are needed"),
        ({"backend": "mpi"}, "neither nccl nor gloo"),
        ({"use_ray": True}, "neither|needs Ray"),
    ],
)
def test_arguments_that_make_no_group_are_refused(arguments: dict[str, Any], text: str) -> None:
    good = {"backend": "gloo", "init_method": "tcp://127.0.0.1:1", "world_size": 2, "rank": 0, "group_name": "openrlhf"}
    with pytest.raises(ConfigError, match=text):
        init_process_group(**{**good, **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said where there is no GPU, and this machine has one")
def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="NCCL needs a GPU"):
        init_process_group("nccl", "tcp://127.0.0.1:1", world_size=2, rank=0, group_name="openrlhf")


def test_rank_0_without_a_group_is_told() -> None:
    with pytest.raises(ConfigError, match="no group to broadcast to"):
        broadcast_weights_to_vllm(torch.nn.Linear(2, 2), [], None, 0)


@pytest.mark.parametrize("method", ["init_process_group", "update_weight", "update_weight_cuda_ipc"])
def test_the_methods_take_what_the_originals_take(method: str) -> None:
    import inspect

    originals = {
        "init_process_group": "master_address master_port rank_offset world_size group_name backend use_ray timeout_minutes",
        "update_weight": "name dtype shape empty_cache",
        "update_weight_cuda_ipc": "name dtype shape ipc_handles empty_cache",
    }
    found: Callable[..., Any] = getattr(WorkerWrap, method)
    assert " ".join(list(inspect.signature(found).parameters)[1:]) == originals[method]
