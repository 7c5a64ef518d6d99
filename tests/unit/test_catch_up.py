"""`catch_up`: engines that lack the current version get it with one call."""

from __future__ import annotations

import pytest
from helpers.named_weights import WEIGHTS, Trainer, engine_named, serves

from instep.errors import ApplyError, EngineLost, VersionConflict

pytestmark = pytest.mark.usefixtures("segments")


def test_catch_up_before_any_push() -> None:
    engine = engine_named()
    with pytest.raises(VersionConflict, match="there is no current version to catch up with") as caught:
        Trainer(engine).sync.catch_up()
    assert "push one" in str(caught.value)
    assert engine.calls == []


def test_catch_up_with_nothing_to_do() -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    trainer.push("a")
    receipt = trainer.sync.catch_up()
    assert (receipt.version, receipt.engines) == ("a", ())
    assert str(receipt) == "a: every engine serves it already"
    assert serves(engine) == ("a", "a")


@pytest.mark.parametrize("base", [None, "a"])
def test_a_restarted_engine_catches_up_with_one_call(base: str | None) -> None:
    """... to what was pushed, not to what the trainer has by now."""
    stays, dies = engine_named("stays"), engine_named("dies")
    trainer = Trainer(stays, dies, require="any")
    trainer.push("a")
    trainer.push("b", base=base)
    dies.dead = True
    trainer.source.update(WEIGHTS["c"])
    assert [state.serving for state in trainer.sync.status()] == ["old", "unknown"]
    restarted = dies.restart(WEIGHTS["start"])
    receipt = trainer.sync.catch_up(restarted)
    assert (receipt.version, [engine.engine for engine in receipt.engines]) == ("b", ["dies"])
    assert serves(restarted) == serves(stays) == ("b", "b")
    assert [state.engine for state in trainer.sync.status()] == ["stays", "dies"]
    assert trainer.push("c").failed == ()
    assert serves(restarted) == ("c", "c")


def test_a_new_engine_takes_the_place_of_one_that_nobody_knew_was_dead() -> None:
    stays, dies = engine_named("stays"), engine_named("dies")
    trainer = Trainer(stays, dies)
    trainer.push("a")
    dies.dead = True
    new = engine_named("new")
    assert [engine.engine for engine in trainer.sync.catch_up(new).engines] == ["dies"]
    assert serves(new) == ("a", "a")
    assert [(state.engine, state.serving) for state in trainer.sync.status()] == [("stays", "old"), ("dies", "old")]


def test_an_engine_catches_up_with_what_was_rounded_for_it() -> None:
    trainer = Trainer(engine_named("stays"), engine_named("lacks"), cast=True, require="any")
    trainer.source.update({name: tensor.double() for name, tensor in WEIGHTS["a"].items()})
    trainer.sync._session.fleet.members[1].engine.inject("prepare")  # type: ignore[attr-defined]
    assert [state.engine for state in trainer.sync.push("a").failed] == ["lacks"]
    trainer.sync.catch_up()
    assert [serves(member.engine) for member in trainer.sync._session.fleet.members] == [("a", "a")] * 2  # type: ignore[arg-type]
    trainer.source.update({name: tensor.double() for name, tensor in WEIGHTS["b"].items()})
    assert trainer.sync.push("b").failed == ()


def test_an_engine_that_restarts_in_its_place_catches_up() -> None:
    """A supervisor brings its workers back: the same handle, new processes."""
    stays, restarts = engine_named("stays"), engine_named("restarts")
    trainer = Trainer(stays, restarts)
    trainer.push("a")
    vars(restarts).update(vars(restarts.restart(WEIGHTS["start"])))
    assert serves(restarts) == ("start", None)
    assert [state.version for state in trainer.sync.status()] == ["a", None]
    assert [engine.engine for engine in trainer.sync.catch_up().engines] == ["restarts"]
    assert serves(restarts) == ("a", "a")


def test_one_more_engine_joins() -> None:
    trainer = Trainer(engine_named())
    trainer.push("a")
    more = [engine_named(), engine_named()]
    for engine in more:
        receipt = trainer.sync.catch_up(engine)
        assert len(receipt.engines) == 1
        assert serves(engine) == ("a", "a")
    receipt = trainer.push("b")
    assert len({engine.engine for engine in receipt.engines}) == 3
    assert [serves(engine) for engine in more] == [("b", "b")] * 2


def test_catch_up_after_a_failed_push() -> None:
    good, bad = engine_named("good"), engine_named("bad")
    trainer = Trainer(good, bad)
    trainer.push("a")
    bad.inject("tensor", tensor=2)
    with pytest.raises(ApplyError, match="bad: the engine's loader failed"):
        trainer.push("b")
    trainer.source.update(WEIGHTS["c"])
    receipt = trainer.sync.catch_up()
    assert (receipt.version, [engine.engine for engine in receipt.engines]) == ("b", ["bad"])
    assert serves(good) == serves(bad) == ("b", "b")


def test_catch_up_after_a_push_that_reached_nobody() -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    trainer.push("a")
    engine.inject("prepare", "error")
    with pytest.raises(EngineLost):
        trainer.push("b")
    with pytest.raises(VersionConflict, match="no current version"):
        trainer.sync.catch_up()
    assert serves(engine) == ("a", "a")
