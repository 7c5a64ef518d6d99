"""The drop-in for TorchRL's double-buffer scheme: whatever happens to the writer, a reader loads one whole version, and says which."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dropin_pairs import LATER, NEW, OLD, holds

from instep import MemoryEngine
from instep.dropin.torchrl import VLLMDoubleBufferSyncScheme
from instep.dropin.torchrl.directory import buffer
from instep.errors import ConfigError, PlanError, SourceError, SyncError

pytestmark = [pytest.mark.usefixtures("segments"), pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_the_pages_own_sequence(place: Path, strategy: Any) -> None:
    engine = MemoryEngine(OLD)
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(place), num_threads=4, strategy=strategy)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
    sender.register_model(NEW)
    version = sender.update_weights()
    assert receiver.poll_and_apply()
    assert (holds(engine), engine.version, receiver.version) == ("new", version, version)
    again = sender.update_weights(LATER)
    assert receiver.poll_and_apply()
    assert (holds(engine), engine.version) == ("later", again)


def test_polling_is_true_once_for_each_version(place: Path) -> None:
    """Where it is told how long to wait. TorchRL's never waits: it is true every time, and raises where there is nothing yet."""
    engine = MemoryEngine(OLD)
    scheme = VLLMDoubleBufferSyncScheme(str(place))
    receiver = scheme.create_receiver(engine)
    assert not receiver.poll_and_apply(0.05)
    with pytest.raises(SourceError, match="nothing was written"):
        receiver.poll_and_apply()
    scheme.create_sender().update_weights(NEW)
    assert [receiver.poll_and_apply(0.05) for _ in range(3)] == [True, False, False]
    assert receiver.poll_and_apply()  # at once, since nothing is to be waited for
    assert holds(engine) == "new"


def test_a_poll_waits_for_the_writer(place: Path) -> None:
    engine = MemoryEngine(OLD)
    scheme = VLLMDoubleBufferSyncScheme(str(place))
    threading.Timer(0.1, scheme.create_sender().update_weights, [NEW]).start()
    assert scheme.create_receiver(engine).poll_and_apply(timeout=20)
    assert holds(engine) == "new"


def test_trainer_and_engine_may_see_the_directory_under_different_paths(place: Path, tmp_path: Path) -> None:
    scheme = VLLMDoubleBufferSyncScheme(str(place), local_addr=str(tmp_path / "copy"))
    scheme.create_sender().update_weights(NEW)
    shutil.copytree(place, tmp_path / "copy")
    engine = MemoryEngine(OLD)
    assert scheme.create_receiver(engine).poll_and_apply()
    assert holds(engine) == "new"


@pytest.mark.parametrize("position", ["header", "middle", "end", "cut", "empty", "other"])
def test_a_damaged_buffer_is_refused_and_the_engine_keeps_what_it_serves(place: Path, position: str) -> None:
    engine = MemoryEngine(OLD)
    scheme = VLLMDoubleBufferSyncScheme(str(place))
    sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
    sender.update_weights(NEW)
    path = buffer(place, 1)
    data = bytearray(path.read_bytes())
    if position == "cut":
        data = data[:-100]
    elif position == "empty":
        data = bytearray()
    elif position == "other":
        from safetensors.torch import save

        data = bytearray(save({"model.norm.weight": torch.ones(8)}))
    else:
        data[{"header": 20, "middle": len(data) * 3 // 4, "end": -1}[position]] ^= 1
    path.write_bytes(data)
    with pytest.raises((SourceError, PlanError), match=r"no whole version|is not what|buffer-1"):
        receiver.poll_and_apply(0)
    assert (holds(engine), receiver.version) == ("old", None)
    sender.update_weights(LATER)
    assert receiver.poll_and_apply(0)
    assert holds(engine) == "later"


def test_a_load_that_failed_is_made_again_by_the_next_poll(place: Path) -> None:
    engine = MemoryEngine(OLD)
    scheme = VLLMDoubleBufferSyncScheme(str(place))
    receiver = scheme.create_receiver(engine)
    scheme.create_sender().update_weights(NEW)
    engine.inject("tensor", tensor=2)
    with pytest.raises(SyncError):
        receiver.poll_and_apply(0)
    assert receiver.version is None
    assert receiver.poll_and_apply(0)
    assert (holds(engine), engine.generate([1], 1) is not None) == ("new", True)


def test_weights_at_hand(place: Path) -> None:
    engine = MemoryEngine(OLD)
    scheme = VLLMDoubleBufferSyncScheme(str(place))
    receiver = scheme.create_receiver(engine)
    receiver.apply_weights(NEW)
    assert holds(engine) == "new"
    with pytest.raises(ValueError, match="in place"):
        receiver.apply_weights(NEW, inplace=False)
    scheme.create_sender().update_weights(LATER)
    assert receiver.poll_and_apply(0)
    assert holds(engine) == "later"
    with pytest.raises(ConfigError, match="no weights to write"):
        scheme.create_sender().update_weights()
