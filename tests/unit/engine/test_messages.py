"""What is said to somebody who made a mistake: it reaches them, and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.errors import ConfigError, TransportError
from instep.transport.shm import segment as shm

OLD, NEW = attention(0), attention(1)


@pytest.mark.usefixtures("segments")
def test_what_a_worker_says_to_do_reaches_the_trainer() -> None:
    """The segment is gone when the worker looks for it."""
    engine = MemoryEngine(OLD)
    with WeightSync(NEW, [engine], transport="shm") as sync:
        opened = engine.receivers[0].open_reader

        def gone(manifest: Any, me: Any) -> Any:
            (shm.directory() / manifest.location.address).rename(shm.directory() / "elsewhere")
            try:
                return opened(manifest, me)
            finally:
                (shm.directory() / "elsewhere").rename(shm.directory() / manifest.location.address)

        engine.receivers[0].open_reader = gone
        with pytest.raises(TransportError, match="memory: cannot open the trainer's shared memory") as caught:
            sync.push("new")
    assert "next: shm needs trainer and engine on one host" in str(caught.value)


def test_a_folder_that_no_file_can_be_made_in(segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WeightSync(NEW, [MemoryEngine(OLD)], transport="shm") as sync:
        monkeypatch.setattr(shm, "directory", lambda: segments / "nowhere")
        with pytest.raises(TransportError, match=r"cannot make a file in .*nowhere: No such file or directory") as caught:
            sync.push("new")
    assert "set TMPDIR" in str(caught.value)


@pytest.mark.parametrize("wrong", [{"point": "comit"}, {"point": "commit", "kind": "explode"}], ids=str)
def test_a_fault_that_is_not_there_is_not_injected(wrong: dict[str, Any]) -> None:
    """... or a test of it could not fail."""
    with pytest.raises(ConfigError, match=r"cannot inject '(comit|explode)'; known: "):
        MemoryEngine(OLD).inject(**wrong)


@pytest.mark.parametrize("tp", [0, -1, 2.0, "2"])
def test_an_engine_has_one_worker_or_more(tp: Any) -> None:
    with pytest.raises(ConfigError, match=f"tp is the number of an engine's workers, 1 or more, not {tp!r}"):
        MemoryEngine(OLD, tp=tp)


def test_an_engine_in_memory_is_made_of_names_and_tensors() -> None:
    with pytest.raises(ConfigError, match="not of a Linear") as caught:
        MemoryEngine(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    assert "state_dict()" in str(caught.value)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("tp", [3, 5])
def test_sizes_that_workers_do_not_divide(tp: int) -> None:
    engine = MemoryEngine(OLD, tp=tp)
    with WeightSync(NEW, [engine]) as sync:
        sync.push("new")
    assert engine.fingerprint() == MemoryEngine(NEW, tp=tp).fingerprint() != MemoryEngine(OLD, tp=tp).fingerprint()
