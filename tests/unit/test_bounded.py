"""What stays behind from push to push has a bound: memory of versions, threads, keys of a store."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.named_weights import Trainer, engine_named, serves

from instep import history
from instep.engine.vllm import engine as vllm
from instep.engine.vllm.engine import VllmEngine
from instep.errors import EngineTimeout, VersionConflict
from instep.history import KEPT, History

pytestmark = pytest.mark.usefixtures("segments")


def test_a_history_keeps_the_last_versions_and_costs_no_more_than_it_says() -> None:
    tracemalloc.start()
    known: History[int] = History()
    for number in range(3 * KEPT):
        known[f"step-{number}"] = number
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(known) == KEPT
    assert known[f"step-{3 * KEPT - 1}"] == 3 * KEPT - 1
    assert f"step-{2 * KEPT - 1}" not in known
    assert taken < 16 << 20


def test_a_version_that_is_served_again_is_the_newest() -> None:
    known: History[str] = History(a="1", b="2")
    known["a"] = "3"
    assert list(known.items()) == [("b", "2"), ("a", "3")]


def test_trainer_and_worker_remember_so_many_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT", 3)
    engine = engine_named()
    trainer = Trainer(engine)
    for version in ("v0", "v1", "v2", "v3"):
        trainer.push(version, "a")
    with pytest.raises(VersionConflict, match="'v1' was pushed before, 2 versions ago"):
        trainer.push("v1", "b")
    assert list(engine.receivers[0].history) == ["v1", "v2", "v3"]
    trainer.push("v0", "b")  # forgotten: a label for other weights
    assert serves(engine) == ("b", "v0")


@pytest.mark.usefixtures("deadlines")
def test_what_was_attempted_is_forgotten_when_it_is_known_what_came_of_it() -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    (member,) = trainer.sync._session.fleet.members
    for number in range(5):
        engine.inject("commit", "hang")
        with pytest.raises(EngineTimeout):
            trainer.push(f"late-{number}", "a")
    trainer.push("a")
    trainer.sync.status()
    assert member.attempted == {"a"}


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_a_push_leaves_no_keys_in_the_store(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.pretend_cuda import pretend_nccl

    pretend_nccl(monkeypatch, 1 << 20)
    trainer = Trainer(engine_named(), transport=transport, timeout=20)
    counts = []
    for number in range(4):
        trainer.push(f"v{number}", "a")
        used: Any = trainer.sync._session.transport.used
        counts.append(used.store.num_keys())
    trainer.sync.close()
    assert len(set(counts)) == 1


class Llm:
    """As much of `vllm.LLM` as an engine asks."""

    def __init__(self) -> None:
        self.llm_engine = SimpleNamespace(vllm_config=None)

    def collective_rpc(self, *_: Any, **__: Any) -> list[bytes]:
        return []


def test_an_llm_that_nobody_has_any_more_is_collected_with_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "commits", lambda _: False)
    before, seen = threading.active_count(), []
    for _ in range(10):
        llm = Llm()
        engine = VllmEngine(llm)
        assert asyncio.run(engine.call("hello", b"")) == []
        seen.append(weakref.ref(llm))
        del llm, engine
    gc.collect()
    assert [ref() for ref in seen] == [None] * 10
    for thread in threading.enumerate():
        if thread.name == "instep-vllm":
            thread.join(30)
    assert threading.active_count() <= before
