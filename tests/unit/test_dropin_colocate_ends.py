"""An update through a shared buffer ends on both halves, whatever is refused and whichever half dies; and vLLM's own trainer half."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_workers import Engine
from toys import attention

from instep.dropin.answers import in_thread
from instep.dropin.colocate_wire import Bucket, Buffer, End, Item, message_of, open_line
from instep.dropin.handles import SEGMENT
from instep.dropin.vllm_rlhf import ColocateSender
from instep.errors import PlanError, TransportError
from instep.protocol import TensorMeta
from instep.transport.shm import Segment

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: vLLM brings it")
pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("segments")]


class Example:
    """The trainer half of vLLM's `rlhf_colocate.py`, over shared memory in the place of a GPU's: it looks at no answer."""

    def __init__(self, weights: dict[str, torch.Tensor], folder: Path, end: bool = True) -> None:
        self.weights, self.address, self.end = weights, f"ipc://{folder}/zmq.sock", end
        self.context = zmq.Context()

    def get_zmq_handles(self, device: str) -> dict[str, str]:
        return {device: self.address}

    def update_weights(self) -> None:
        def padded(p: torch.Tensor) -> int:
            return -(-p.nbytes // 256) * 256

        segment = Segment(2 * max(map(padded, self.weights.values())))
        buffer = torch.from_numpy(segment.view)
        socket = self.context.socket(zmq.REQ)
        socket.bind(self.address)
        try:
            socket.send_pyobj((SEGMENT, (segment.name, segment.size)))
            socket.recv()
            for name, p in self.weights.items():  # a bucket for each, which is what the example does with large tensors
                buffer[: p.nbytes] = p.reshape(-1).view(torch.uint8)
                socket.send_pyobj([{"name": name, "dtype": p.dtype, "shape": p.shape, "offset": 0}])
                socket.recv()
            if self.end:
                socket.send_pyobj(None)
                socket.recv()
        finally:
            socket.close(linger=0)
            del buffer
            segment.close()


@pytest.fixture
def engine() -> Engine:
    return Engine(1)


@pytest.fixture
def device(engine: Engine) -> str:
    found: str = engine.call("report_device_id")[0]
    return found


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Any]:
    made: list[Example] = []

    def make(weights: dict[str, torch.Tensor], **how: bool) -> Example:
        made.append(Example(weights, tmp_path, **how))
        return made[-1]

    yield make
    for one in made:
        one.context.destroy(linger=0)


def test_vllms_own_trainer_half_updates_the_engine(engine: Engine, device: str, example: Any) -> None:
    for seed in (2, 3):
        trainer = example(attention(seed))
        taking = engine.starts("update_weights_from_ipc", trainer.get_zmq_handles(device))
        trainer.update_weights()
        assert taking.result(20)[0]["committed"]
        assert engine.serves(seed)


@pytest.mark.parametrize("wrong", ["a dtype", "a name that comes twice"])
def test_what_is_refused_ends_vllms_own_trainer_half(engine: Engine, device: str, example: Any, wrong: str) -> None:
    weights = attention(2)
    if wrong == "a dtype":
        weights[list(weights)[1]] = weights[list(weights)[1]].to(torch.complex64)
    trainer = example(weights)
    if wrong != "a dtype":
        trainer.weights = Twice(weights)
    taking = engine.starts("update_weights_from_ipc", trainer.get_zmq_handles(device))
    started = time.monotonic()
    with pytest.raises(zmq.ZMQError):
        trainer.update_weights()
    with pytest.raises(Exception, match=r"dtype 'complex64' cannot be sent|came twice"):
        taking.result(20)
    assert time.monotonic() - started < 10
    assert engine.serves(1)


class Twice(dict[str, torch.Tensor]):
    def items(self) -> Any:
        return [*super().items(), *super().items()]


def test_a_trainer_half_that_leaves_ends_the_workers(engine: Engine, device: str, example: Any) -> None:
    trainer = example(attention(2), end=False)
    taking = engine.starts("update_weights_from_ipc", trainer.get_zmq_handles(device))
    trainer.update_weights()
    started = time.monotonic()
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
