"""Who is listed, and what a `WeightSync` does while a push is running, and after it was closed."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from helpers.named_weights import WEIGHTS, Trainer, engine_named, serves

from instep import MemoryEngine, WeightSync
from instep.engine.remote.rpc import Endpoint, LocalRpc, RemoteEngine
from instep.errors import ConfigError, TransportError

pytestmark = pytest.mark.usefixtures("segments")


def names(sync: WeightSync) -> list[str]:
    return [state.engine for state in sync.status()]


def held_up(engine: MemoryEngine) -> threading.Event:
    """The engine's next commit waits until this is set."""
    handle, go_on = engine.receivers[0].handle, threading.Event()

    def waiting(method: str, payload: bytes) -> bytes:
        if method == "commit":
            assert go_on.wait(30)
        return handle(method, payload)

    engine.receivers[0].handle = waiting  # type: ignore[method-assign]
    return go_on


class Running:
    """A push in another thread, in the middle of its commit."""

    def __init__(self, trainer: Trainer, engine: MemoryEngine, version: str) -> None:
        self.go_on = held_up(engine)
        self.thread = threading.Thread(target=trainer.push, args=(version, "a"))
        self.thread.start()
        while "commit" not in engine.calls:
            time.sleep(0.002)

    def end(self) -> None:
        self.go_on.set()
        self.thread.join(30)


def test_an_engine_is_not_taken_in_while_a_push_is_running() -> None:
    engine, new = engine_named("one"), engine_named("new")
    trainer = Trainer(engine)
    running = Running(trainer, engine, "v1")
    for _ in range(2):
        with pytest.raises(ConfigError, match="a push is running already"):
            trainer.sync.catch_up(new)
    assert new.calls == []
    running.end()
    assert names(trainer.sync) == ["one"]
    assert [one.engine for one in trainer.sync.catch_up(new).engines] == ["new"]
    assert names(trainer.sync) == ["one", "new"]
    assert serves(new) == ("a", "v1")
    trainer.sync.close()


def test_an_engine_that_is_listed_is_not_listed_twice() -> None:
    engine, new = engine_named("one"), engine_named("new")
    trainer = Trainer(engine)
    trainer.push("v1", "a")
    trainer.sync.catch_up(new)
    for listed in (engine, new):
        with pytest.raises(ConfigError, match=f"{listed.name} is listed already") as caught:
            trainer.sync.catch_up(listed)
        assert "catch_up() without an engine" in str(caught.value)
    assert names(trainer.sync) == ["one", "new"]
    trainer.push("v2", "b")
    assert [serves(one) for one in (engine, new)] == [("b", "v2")] * 2


def test_nor_under_another_handle() -> None:
    """Two objects that lead to the same workers, as two URLs of a server do."""
    engine = engine_named()
    one, other = (RemoteEngine(LocalRpc(Endpoint(engine).answer, name)) for name in ("one", "other"))
    with WeightSync(WEIGHTS["a"], [one]) as sync:
        sync.push("v1")
        with pytest.raises(ConfigError, match="one is listed already"):
            sync.catch_up(other)
        assert names(sync) == ["one"]
    with (
        WeightSync(WEIGHTS["b"], [one, other]) as sync,
        pytest.raises(ConfigError, match="one and other are one engine: it is listed twice"),
    ):
        sync.push("v2")
    assert serves(engine) == ("a", "v1")


def test_what_is_no_engine_changes_nothing() -> None:
    trainer = Trainer(engine_named())
    trainer.push("v1", "a")
    with pytest.raises(ConfigError, match="cannot push to int"):
        trainer.sync.catch_up(7)
    assert names(trainer.sync) == ["memory"]


def test_one_that_has_died_may_be_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same handle, behind which a supervisor has started another process."""
    engine, stays = engine_named("one"), engine_named("stays")
    trainer = Trainer(engine, stays)
    trainer.push("v1", "a")
    engine.dead = True
    trainer.sync.status()
    vars(engine).update(vars(engine.restart(WEIGHTS["start"])))
    engine.dead = True  # it starts only when it is asked

    async def hello(*arguments: Any, call: Any = engine.call) -> Any:
        if engine.calls.count("hello") > 0:
            engine.dead = False
        return await call(*arguments)

    monkeypatch.setattr(engine, "call", hello)
    assert [one.engine for one in trainer.sync.catch_up(engine).engines] == ["one"]
    assert sorted(names(trainer.sync)) == ["one", "stays"]
    trainer.push("v2", "b")
    assert serves(engine) == ("b", "v2")


def test_close_waits_for_a_push_in_another_thread() -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    running = Running(trainer, engine, "v1")
    closing = threading.Thread(target=trainer.sync.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    running.end()
    closing.join(30)
    assert not closing.is_alive()
    assert serves(engine) == ("a", "v1")


def test_close_on_the_event_loop_of_a_push_is_refused_with_its_reason() -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    trainer.source.update(WEIGHTS["a"])

    async def main() -> None:
        engine.inject("commit", "hang")
        push = asyncio.create_task(trainer.sync.apush("v1"))
        while "commit" not in engine.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        with pytest.raises(ConfigError, match="a push is running") as caught:
            trainer.sync.close()
        assert "await it, or cancel it" in str(caught.value)
        push.cancel()
        await asyncio.wait([push])

    asyncio.run(main())
    trainer.push("v2", "a")
    trainer.sync.close()
    trainer.sync.close()


@pytest.mark.parametrize("call", ["push", "catch_up"])
def test_nothing_is_touched_after_close(call: str) -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    trainer.push("v1", "a")
    trainer.sync.close()
    engine.calls.clear()
    with pytest.raises(TransportError, match="the WeightSync was closed") as caught:
        getattr(trainer.sync, call)(*["v2"][: call == "push"])
    assert "make a new one" in str(caught.value)
    assert engine.calls == []


class Stuck(MemoryEngine):
    """Answers nothing while it is stuck, and counts what it is asked meanwhile."""

    stuck = False
    questions = 0

    async def call(self, method: Any, payload: bytes) -> list[bytes]:
        if self.stuck:
            self.questions += 1
        while self.stuck:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await super().call(method, payload)


def test_an_engine_that_hangs_is_left_out_until_it_answers() -> None:
    """With `require="any"` one question is under way to it, for which no push waits."""
    stuck, other = Stuck(WEIGHTS["start"], name="stuck"), engine_named("other")
    trainer = Trainer(stuck, other, require="any", timeout=2.0)
    trainer.push("v0", "a")
    stuck.stuck = True
    assert [state.engine for state in trainer.push("v1", "b").failed] == ["stuck"]
    for thread in trainer.sync._session.fleet.silent._asking.values():
        thread.join()
    trainer.sync._session.fleet.members[0].timeout = 1000.0  # of the question that the next push asks
    stuck.questions = 0
    for version in ("v2", "v3", "v4"):
        receipt = trainer.push(version, "c")
        assert receipt.failed[0].reason == "stuck did not answer hello within 2 s"
        assert serves(other) == ("c", version)
    assert stuck.questions == 1
    stuck.stuck = False
    for thread in trainer.sync._session.fleet.silent._asking.values():
        thread.join()
    assert trainer.push("v5", "a").failed == ()
    assert serves(stuck) == serves(other) == ("a", "v5")
    trainer.sync.close()


def test_catching_up_waits_for_an_engine_that_has_hung() -> None:
    hung, other = engine_named("hung"), engine_named("other")
    trainer = Trainer(hung, other, require="any", timeout=1.0)
    trainer.push("v0", "a")
    hung.inject("prepare", "hang")
    assert [state.engine for state in trainer.push("v1", "b").failed] == ["hung"]
    trainer.sync.catch_up()
    assert serves(hung) == serves(other) == ("b", "v1")
    trainer.sync.close()
