"""A transport that engines could not open once is left out for a while, and tried again: what was in
the way may be gone, as where a process had too many files open."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from helpers.named_weights import WEIGHTS, Trainer, engine_named, serves

from instep.errors import TransportError, VersionConflict
from instep.transport.auto import SKIPPED, AutoTransport

pytestmark = pytest.mark.usefixtures("segments")


class Files:
    """The files of a worker. While `full`, it has too many open to open a segment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.tried, self.open = False, 0, os.open
        monkeypatch.setattr(os, "open", self)

    def __call__(self, path: Any, flags: int, *mode: int) -> int:
        if not flags & os.O_RDWR and str(path).rpartition("/")[2].startswith("instep-"):
            self.tried += 1
            if self.full:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.open(path, flags, *mode)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(monkeypatch)


def test_shared_memory_comes_back_after_one_failure(files: Files) -> None:
    engine = engine_named()
    trainer = Trainer(engine, timeout=20)
    assert trainer.push("v0", "a").transport == "shm"
    files.full = True
    receipt = trainer.push("v1", "b")
    assert receipt.transport == "gloo"
    assert "not shm, because memory: cannot open the trainer's shared memory" in receipt.why
    assert "Too many open files (tried again with the next push)" in receipt.why
    files.full = False
    receipt = trainer.push("v2", "c")
    assert (receipt.transport, "shm" in receipt.why) == ("shm", False)
    assert serves(engine) == ("c", "v2")
    trainer.sync.close()


def test_an_engine_that_cannot_open_a_version_gets_no_other_weights_under_its_name(files: Files) -> None:
    """`catch_up` after the trainer has stepped: what another transport would send are weights of now."""
    trainer = Trainer(engine_named("stays"), timeout=20)
    trainer.push("a")
    trainer.source.update(WEIGHTS["b"])
    files.full, late = True, engine_named("late")
    with pytest.raises(VersionConflict, match="the trainer's weights are no longer those of 'a'"):
        trainer.sync.catch_up(late)
    assert serves(late) == ("start", None)
    trainer.source.update(WEIGHTS["a"])
    receipt = trainer.sync.catch_up()
    assert (receipt.transport, [engine.engine for engine in receipt.engines]) == ("gloo", ["late"])
    assert serves(late) == ("a", "a")
    trainer.sync.close()


def test_it_is_tried_after_twice_as_many_pushes_each_time(files: Files) -> None:
    trainer = Trainer(engine_named(), timeout=20)
    files.full, tried, why = True, [], []
    for number in range(1, 10):
        before = files.tried
        why.append(trainer.push(f"v{number}", "a").why)
        if files.tried > before:
            tried.append(number)
    assert tried == [1, 2, 4, 8]
    assert "(tried again after 1 more push)" in why[1]
    assert "(tried again with the next push)" in why[2]
    assert "(tried again after 3 more pushes)" in why[3]
    files.full = False
    found = [trainer.push(f"again-{number}", "a").transport for number in range(8)]
    assert found == ["gloo"] * 6 + ["shm"] * 2
    files.full = True  # and counts from the beginning
    assert "(tried again with the next push)" in trainer.push("full", "a").why
    trainer.sync.close()


def test_it_is_never_left_out_for_good() -> None:
    transport, left = AutoTransport("auto", 1.0), []
    for _ in range(20):
        transport.used = transport.candidates["shm"]
        assert transport.give_up(TransportError("too many files"), [])
        left.append(0)
        transport.begin()
        while "shm" in transport.left_out:
            left[-1] += 1
            transport.begin()
    assert left[:4] == [0, 1, 3, 7]
    assert max(left) == SKIPPED
    transport.close()


def test_one_that_was_asked_for_by_name_is_not_left_out(files: Files) -> None:
    engine = engine_named()
    trainer = Trainer(engine, transport="shm", timeout=20)
    files.full = True
    for _ in range(3):
        with pytest.raises(TransportError, match="Too many open files"):
            trainer.push("v1", "a")
    files.full = False
    assert trainer.push("v1", "a").transport == "shm"
    trainer.sync.close()
