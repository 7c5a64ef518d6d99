"""The order of versions: what is pushed twice, out of order, or by two trainers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.named_weights import WEIGHTS, Trainer, engine_named, serves

from instep import WeightSync
from instep.errors import ConfigError, SyncError, VersionConflict

pytestmark = pytest.mark.usefixtures("segments")


def test_a_version_twice() -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    trainer.push("a")
    with pytest.raises(VersionConflict, match="version 'a' was pushed before: it is the current one") as caught:
        trainer.push("a", "b")
    assert "catch_up" in str(caught.value)
    assert serves(engine) == ("a", "a")


def test_an_older_version() -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    for version in ("a", "b", "c"):
        trainer.push(version)
    with pytest.raises(VersionConflict, match="version 'a' was pushed before, 2 versions ago"):
        trainer.push("a")
    assert serves(engine) == ("c", "c")


def test_older_weights_under_a_new_name() -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    for version, weights in (("1", "a"), ("2", "b"), ("3", "a")):
        trainer.push(version, weights)
        assert serves(engine) == (weights, version)


def test_the_engine_remembers_versions_longer_than_a_trainer() -> None:
    """A restarted trainer may bring the same bytes again, not others under a name that was served."""
    engine = engine_named()
    Trainer(engine).push("a")
    with pytest.raises(VersionConflict, match="memory: version 'a' was served before, with other bytes"):
        Trainer(engine).push("a", "b")
    assert serves(engine) == ("a", "a")
    Trainer(engine).push("a")
    assert serves(engine) == ("a", "a")


@pytest.mark.parametrize("version", ["", "two words", "ü", "x" * 129, "line\nbreak", 7, None])
def test_a_version_is_a_short_word(version: Any) -> None:
    engine = engine_named()
    with pytest.raises(ConfigError, match="a version is a string of 1 to 128 printable ASCII characters"):
        WeightSync(WEIGHTS["a"], [engine]).push(version)
    assert engine.calls == []


def test_base() -> None:
    engine = engine_named()
    trainer = Trainer(engine)
    with pytest.raises(VersionConflict, match="version 'a' follows 'start', but the engine serves None"):
        trainer.push("a", base="start")
    trainer.push("a")
    trainer.push("b", base="a")
    with pytest.raises(VersionConflict, match="memory: version 'c' follows 'a', but the engine serves 'b'"):
        trainer.push("c", base="a")
    assert serves(engine) == ("b", "b")
    trainer.push("c", base="b")


def test_another_trainer_in_between() -> None:
    engine = engine_named()
    first, second = Trainer(engine), Trainer(engine)
    first.push("a")
    second.push("b")
    with pytest.raises(VersionConflict, match="memory serves 'b', this trainer left it at 'a': another trainer pushes to it") as caught:
        first.push("c")
    assert "stop the other trainer" in str(caught.value)
    assert serves(engine) == ("b", "b")
    second.push("c")
    assert serves(engine) == ("c", "c")


def test_two_trainers_that_push_at_once_never_mix() -> None:
    """One wins, or both in turn; the engine holds one whole version under its own label."""
    engine = engine_named()
    trainers = {name: Trainer(engine) for name in ("a", "b")}

    async def main() -> list[Any]:
        for name, trainer in trainers.items():
            trainer.source.update(WEIGHTS[name])
        return await asyncio.gather(*(trainer.sync.apush(name) for name, trainer in trainers.items()), return_exceptions=True)

    results = asyncio.run(main())
    weights, label = serves(engine)
    assert weights == label
    failures = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(failure, VersionConflict | SyncError) for failure in failures)
    assert len(failures) < 2


@pytest.mark.parametrize("engines", ["nothing", "the same twice", "something else", "no list", "a URL"])
def test_engines_that_are_none(engines: str) -> None:
    engine = engine_named()
    given: dict[str, tuple[Any, str]] = {
        "nothing": ([], "at least one engine"),
        "the same twice": ([engine, engine], "listed twice"),
        "something else": ([3], "cannot push to int"),
        "no list": (engine, "engines is a list, not MemoryEngine"),
        "a URL": ("http://gpu1:8000", "engines is a list, not str"),
    }
    with pytest.raises(ConfigError, match=given[engines][1]):
        WeightSync(WEIGHTS["a"], given[engines][0])
