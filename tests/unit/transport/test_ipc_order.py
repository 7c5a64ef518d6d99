"""Over CUDA IPC the trainer's sums are the first read of a version, and what workers pull is the second one: in this order."""

from __future__ import annotations

from typing import Any

import pytest

from instep.errors import SyncError
from instep.receiver.pull import Puller
from instep.transport.ipc import driver
from instep.transport.ipc import read as ipc_reader
from unit.test_trust import ONE, TWO, alone, fill, same

__all__ = ["alone"]  # a fixture

pytestmark = [pytest.mark.usefixtures("segments"), pytest.mark.parametrize("alone", [("ipc", 1), ("ipc", 2)], indirect=True)]


def test_nothing_is_pulled_before_the_trainers_sums_are_complete(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the first read of the version, and the pull is the second one."""
    sync, engine, source = alone
    read, events = driver.read, list[str]()
    looks = iter([0, 0, 0])

    def later(board: int, nbytes: int) -> bytes:
        events.append("look")
        return bytes(nbytes) if next(looks, None) is not None else read(board, nbytes)

    launch = Puller.launch
    monkeypatch.setattr(driver, "read", later)
    monkeypatch.setattr(Puller, "launch", lambda *arguments: events.append("pull") or launch(*arguments))
    fill(source, TWO)
    sync.push("two")
    assert (engine.version, same(engine, TWO)) == ("two", True)
    assert events.index("pull") >= 5  # three of an earlier launch, then the launch and its sums


def test_an_engine_whose_trainer_does_not_sum_up_keeps_what_it_serves(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, engine, source = alone
    monkeypatch.setattr(driver, "read", lambda _, nbytes: bytes(nbytes))  # of no launch
    monkeypatch.setattr(ipc_reader.IpcReader, "wait_for", impatient(ipc_reader.IpcReader.wait_for))
    fill(source, TWO)
    with pytest.raises(SyncError, match="did not sum up its weights within"):
        sync.push("two")
    assert (engine.version, engine.paused, same(engine, ONE)) == ("one", False, True)


def impatient(told: Any) -> Any:
    def soon(self: Any, launch: int) -> Any:
        self.timeout = 0.02
        return told(self, launch)

    return soon
