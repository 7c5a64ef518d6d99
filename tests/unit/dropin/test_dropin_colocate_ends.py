"""An update through a shared buffer ends on both halves, whatever is refused and whichever half dies; and vLLM's own trainer half."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.colocate_example import TrainingActor
from helpers.rlhf_workers import Engine
from helpers.toys import attention

from instep.dropin import colocate_wire
from instep.dropin.answers import in_thread
from instep.dropin.colocate_wire import Bucket, Buffer, End, Item, message_of, open_line
from instep.dropin.vllm_rlhf import ColocateSender
from instep.errors import PlanError, TransportError
from instep.protocol import TensorMeta

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: vLLM brings it")
pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("segments")]


@pytest.fixture
def engine() -> Engine:
    return Engine(1)


@pytest.fixture
def device(engine: Engine) -> str:
    found: str = engine.call("report_device_id")[0]
    return found


@pytest.fixture
def trainer(device: str, tmp_path: Path) -> Iterator[TrainingActor]:
    made = TrainingActor(device, str(tmp_path))
    yield made
    made.leave()


def test_vllms_own_trainer_half_updates_the_engine(engine: Engine, trainer: TrainingActor) -> None:
    for seed in (2, 3):
        trainer.has(attention(seed).items())
        taking = engine.starts("update_weights_from_ipc", trainer.get_zmq_handles())
        trainer.update_weights()
        assert taking.result(20)[0]["committed"]
        assert engine.serves(seed)


@pytest.mark.parametrize("dies", ["before it comes", "with a message taken", "with a message answered"])
def test_vllms_own_trainer_half_with_a_deadline_ends_when_its_engine_dies(device: str, tmp_path: Path, dies: str) -> None:
    """RCVTIMEO alone does not do: a socket without another side waits in `send`."""
    trainer = TrainingActor(device, str(tmp_path), deadline=500)
    trainer.has(attention(2).items())
    address = trainer.get_zmq_handles()[device]
    running = in_thread(trainer.update_weights)
    if dies != "before it comes":
        other = zmq.Context()
        line = other.socket(zmq.REP)
        line.connect(address)
        assert line.poll(20_000)
        line.recv()
        if dies == "with a message answered":
            line.send(b"")
        other.destroy(linger=200)
    assert isinstance(running.exception(30), zmq.ZMQError)  # Again, as a rule
    trainer.leave()


def test_an_address_that_an_earlier_run_has_left_is_used_again(
    engine: Engine, trainer: TrainingActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own half binds when the worker waits already."""
    handles = trainer.get_zmq_handles()
    left = socket.socket(socket.AF_UNIX)
    left.bind(trainer.zmq_handle.removeprefix("ipc://"))
    left.close()
    taking = engine.starts("update_weights_from_ipc", handles)
    time.sleep(2.5)
    assert not taking.done()
    trainer.has(attention(2).items())
    trainer.update_weights()
    taking.result(20)
    assert engine.serves(2)
    monkeypatch.setattr(colocate_wire, "GRACE", 1.5)
    left = socket.socket(socket.AF_UNIX)
    left.bind(trainer.get_zmq_handles()[trainer.device_uuid].removeprefix("ipc://"))
    left.close()
    with pytest.raises(Exception, match="the trainer is gone"):
        engine.call("update_weights_from_ipc", {trainer.device_uuid: trainer.zmq_handle})


def test_a_trainer_that_binds_late_is_waited_for(engine: Engine, trainer: TrainingActor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocate_wire, "GRACE", 1.5)
    trainer.has(attention(2).items())
    taking = engine.starts("update_weights_from_ipc", trainer.get_zmq_handles())
    time.sleep(3)
    trainer.update_weights()
    taking.result(20)
    assert engine.serves(2)


@pytest.mark.parametrize("wrong", ["a dtype", "a name that comes twice", "an unknown name at the end", "a shape"])
def test_what_is_refused_ends_vllms_own_trainer_half(engine: Engine, trainer: TrainingActor, wrong: str) -> None:
    weights = list(attention(2).items())
    if wrong == "a dtype":
        weights[1] = (weights[1][0], weights[1][1].to(torch.complex64))
    elif wrong == "a shape":
        weights[-1] = (weights[-1][0], torch.ones(3, dtype=torch.bfloat16))
    elif wrong == "an unknown name at the end":
        weights.append(("model.surprise.weight", torch.ones(3, dtype=torch.bfloat16)))
    else:
        weights.insert(2, weights[0])
    trainer.has(weights)
    taking = engine.starts("update_weights_from_ipc", trainer.get_zmq_handles())
    started = time.monotonic()
    with pytest.raises(zmq.ZMQError):
        trainer.update_weights()
    with pytest.raises(Exception, match=r"dtype 'complex64' cannot be sent|came twice|refuses model"):
        taking.result(20)
    assert time.monotonic() - started < 10
    assert engine.serves(1)


def test_a_trainer_half_that_leaves_ends_the_workers(engine: Engine, trainer: TrainingActor) -> None:
    trainer.has(attention(2).items())
    trainer.stop_after = 0
    taking = engine.starts("update_weights_from_ipc", trainer.get_zmq_handles())
    in_thread(trainer.update_weights)
    time.sleep(0.5)
    started = time.monotonic()
    trainer.zmq_context.destroy(linger=0)
    with pytest.raises(Exception, match=r"the trainer is gone: .*the engine serves its first weights"):
        taking.result(20)
    assert time.monotonic() - started < 10
    assert engine.serves(1)


TRAINER = """
import sys, time, torch
from instep.dropin.vllm_rlhf import ColocateSender
sender = ColocateSender({"a.weight": torch.ones(4)}, sys.argv[1])
print(sender.get_zmq_handles()[sys.argv[1]], flush=True)
time.sleep(60)
"""


def test_a_trainer_that_was_killed_before_it_began_is_not_waited_for(engine: Engine, device: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", TRAINER, device], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    started = time.monotonic()
    with pytest.raises(Exception, match="the trainer is gone"):
        engine.call("update_weights_from_ipc", {device: address})
    assert time.monotonic() - started < 10


def test_a_worker_that_dies_ends_the_trainers_half() -> None:
    """It takes the buffer and is gone."""
    sender = ColocateSender(attention(2), "CPU-0")
    (address,) = sender.get_zmq_handles().values()
    sending = in_thread(sender.update_weights)
    with open_line("REP", "the trainer", linger=0) as line:
        line.connect(address)
        assert isinstance(message_of(line.receive(10, "nothing came")), Buffer)
    started = time.monotonic()
    with pytest.raises(TransportError, match="the worker on CPU-0 is gone"):
        sending.result(20)
    assert time.monotonic() - started < 10


def test_a_worker_that_refuses_tells_the_sender_why(engine: Engine, device: str) -> None:
    weights = attention(2)
    removed = weights.pop(list(weights)[-1])
    sender = ColocateSender(weights, device)
    taking = engine.starts("update_weights_from_ipc", sender.get_zmq_handles())
    with pytest.raises(PlanError, match="did not come"):
        sender.update_weights()
    with pytest.raises(Exception, match="did not come"):
        taking.result(20)
    assert removed is not None
    assert engine.serves(1)


def test_pickles_are_opened_as_far_as_the_example_needs_it_and_nothing_in_them_is_called() -> None:
    rows = [{"name": "a", "dtype": torch.bfloat16, "shape": torch.Size([2, 3]), "offset": 256}]
    handle = (torch.multiprocessing.reductions.rebuild_cuda_tensor, (torch.Tensor, torch.Size([4]), (1,), 0, torch.storage.UntypedStorage))
    assert message_of(pickle.dumps(rows)) == Bucket([Item(TensorMeta("a", "bfloat16", (2, 3)), 256)])
    assert message_of(pickle.dumps(None)) == End()
    assert message_of(pickle.dumps(handle)) == Buffer(("rebuild_cuda_tensor", ["Tensor", (4,), (1,), 0, "UntypedStorage"]))
    for harmful in (Calls(os.system, "false"), Calls(torch.load, "x"), Calls(eval, "1"), Calls(torch.Tensor, 3), (print, ("x",)), 7, [7]):
        with pytest.raises(TransportError, match="is no message of a ColocateSender"):
            message_of(pickle.dumps(harmful))


class Calls:
    def __init__(self, function: Any, argument: Any) -> None:
        self.function, self.argument = function, argument

    def __reduce__(self) -> Any:
        return self.function, (self.argument,)


@pytest.mark.parametrize("held", [False, True], ids=["let go", "in a cycle"])
def test_a_sender_that_nobody_holds_any_more_frees_its_address_without_a_warning(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what other tests have left
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sender = ColocateSender({"a": torch.ones(3)}, "cpu")
        folder = Path(sender.get_zmq_handles()["cpu"].removeprefix("ipc://")).parent
        vars(sender)["cycle"] = sender if held else None
        assert folder.exists()
        del sender
        gc.collect()
    assert not folder.exists()
    assert [str(one.exc_value) for one in told] == []


def test_a_line_whose_context_was_ended_closes_without_an_error() -> None:
    with open_line("REQ", "the worker", linger=0) as line:
        line.socket.close()
