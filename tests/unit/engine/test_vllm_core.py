"""A commit within vLLM's engine process, with a core that does nothing: what is called in which order, and what becomes of failures."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from instep.engine.fused_commit import goes_on
from instep.engine.vllm import plugin as vllm_plugin
from instep.engine.vllm.core import commit
from instep.protocol import CommitRequest, Fault, Reply, Request, WorkerReceipt, decode, encode, raw


def replied(state: Any, **told: Any) -> Reply:
    return Reply(1, 0, state, "v" if state == "serving" else "u", None, raw(WorkerReceipt(0, {}, [], [], {}, 1, **told)))


PROVED, UNPROVED = replied("serving", proved=True), replied("unproved")
HALVES = [replied("unproved", parts={"w": {number: part}}, theirs={"w": 7}) for number, part in enumerate((3, 4))]
ACCEPTED = Reply(1, 0, "serving", "v")
FAILED = Reply(1, 1, "dirty", "u", Fault("ApplyError", "the loader failed"))


class Core:
    """vLLM's `EngineCore`. replies: to the commit. busy: it has a step to finish before it is paused."""

    reserved: tuple[Reply, ...] = (Reply(7, 0, "serving", "u"),)

    def __init__(self, *replies: Reply, busy: bool = False, then: Reply = ACCEPTED) -> None:
        self.replies, self.then, self.called = replies, then, list[Any]()
        self.paused: Future[None] | None = Future() if busy else None
        self.input_queue: SimpleQueue[Any] = SimpleQueue()

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self.called.append(("pause", mode, clear_cache))
        return self.paused

    def collective_rpc(self, method: str, args: tuple[str, bytes]) -> list[bytes]:
        self.called.append((method, *args))
        told = {"commit": self.replies, "accept": [self.then] * len(self.replies)}
        return [encode(reply) for reply in told.get(args[0], self.reserved)]

    def set_weight_version(self, version: str) -> None:
        self.called.append(("label", version))

    def resume_scheduler(self) -> None:
        self.called.append("resume")


@pytest.fixture(autouse=True)
def messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", SimpleNamespace(EngineCoreRequestType=SimpleNamespace(WAKEUP="wake up")))


REQUEST, LET_GO = encode(Request(7, "trainer", raw(CommitRequest("v")), 3)), encode(Request(7, "trainer", adapter=3))
RESERVED = ("instep_call", "reserve", encode(Request(7, "trainer", raw("v"), 3)))
PAUSED = [RESERVED, ("pause", "keep", True), ("instep_call", "commit", REQUEST)]
ON = [("label", "v"), "resume", ("instep_call", "abort", LET_GO)]
"""Nobody else may push before its label is there and it has gone on."""


ENDS = [([PROVED], True), ([PROVED, PROVED], True), ([PROVED, UNPROVED], False), ([PROVED, FAILED], False), ([FAILED], False)]


@pytest.mark.parametrize(("replies", "on"), ENDS)
def test_an_engine_goes_on_if_every_worker_has_proved_its_bytes(replies: list[Reply], on: bool) -> None:
    core = Core(*replies)
    assert commit(core, REQUEST, True, "v") == [encode(reply) for reply in replies]
    assert core.called == PAUSED + ON * on


def test_an_engine_that_another_trainer_pushes_to_is_not_paused() -> None:
    core = Core(PROVED)
    core.reserved = (Reply(7, 0, "serving", "u", Fault("EngineBusy", "another trainer is pushing")),)
    assert commit(core, REQUEST, True, "v") == [encode(reply) for reply in core.reserved]
    assert core.called == [RESERVED]


COMMIT = encode(Request(5, "trainer", raw(CommitRequest("v"))))


def test_workers_that_have_proved_a_version_together_accept_it_before_the_engine_goes_on() -> None:
    core = Core(*HALVES)
    answers = commit(core, COMMIT, True, "v")
    assert isinstance(answers, list)
    assert [decode(answer, Reply).state for answer in answers] == ["serving", "serving"]
    _, (_, _, request), *rest, (_, last, _) = core.called[2:]
    assert decode(request, Request) == Request(5, "trainer", raw("v"))
    assert (rest, last) == ([("label", "v"), "resume"], "abort")


def test_where_one_of_them_does_not_accept_it_the_engine_stays_paused() -> None:
    core = Core(*HALVES, then=FAILED)
    answers = commit(core, COMMIT, True, "v")
    assert isinstance(answers, list)
    assert not goes_on(answers)
    assert [call[1] for call in core.called[2:]] == ["commit", "accept"]


def test_a_vllm_without_labels_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Core, "set_weight_version")
    core = Core(PROVED)
    commit(core, REQUEST, True, "v")
    assert core.called == PAUSED + ON[1:]


def test_a_step_is_finished_first() -> None:
    core = Core(PROVED, busy=True)
    done: Any = commit(core, REQUEST, True, "v")
    assert (done.done(), core.called) == (False, PAUSED[:2])
    assert core.paused is not None
    core.paused.set_result(None)
    assert done.result(0) == [encode(PROVED)]
    assert core.called == PAUSED + ON
    assert core.input_queue.get_nowait() == ("wake up", None)  # its loop waits for a message by then


def test_a_pause_that_fails_commits_nothing() -> None:
    core = Core(PROVED, busy=True)
    done: Any = commit(core, REQUEST, True, "v")
    assert core.paused is not None
    core.paused.set_exception(RuntimeError("the caches cannot be reset"))
    with pytest.raises(RuntimeError, match="cannot be reset"):
        done.result(0)
    assert core.called == PAUSED[:2]
    assert core.input_queue.get_nowait() == ("wake up", None)


def configured(replicas: int) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=replicas))


def test_the_plugin_adds_the_call_where_the_core_can_be_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("EngineCore", (Core,), {})
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(EngineCore=kind))
    assert not vllm_plugin.commits(configured(1))
    vllm_plugin.register()
    assert [vllm_plugin.commits(configured(replicas)) for replicas in (1, 2)] == [True, False]
    core: Any = kind(PROVED)
    assert core.instep_commit(REQUEST, True, "v") == [encode(PROVED)]


def test_the_plugin_leaves_other_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    old = type("EngineCore", (), {})  # as before vLLM's core had the pause
    for module in (SimpleNamespace(EngineCore=old), None):
        monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
        vllm_plugin.register()
        assert not vllm_plugin.commits(configured(1))
