"""What travels between a trainer and a worker that share a GPU, and the socket on which it does:
every wait ends."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import torch

from instep.dropin.communicator import dtype_of
from instep.errors import PlanError, TransportError
from instep.extras import needed_by
from instep.faults import fault_of
from instep.protocol import ITEM_BYTES, Fault, TensorMeta, decode, dtype_name, encode

LOOK = 0.5  # seconds between two looks for the other side
GRACE = 10.0  # seconds in which vLLM's own trainer half has to bind an address that is there already
FOLDER = "instep-"
"""How the names of senders' folders begin."""


class Buffer(msgspec.Struct, frozen=True, tag=True):
    """A flat buffer of bytes, by a handle of `handles.py`."""

    handle: tuple[str, list[Any]]


class Item(msgspec.Struct, frozen=True):
    """Where a tensor lies in the buffer (offset in bytes), and its digest where the trainer tells
    it."""

    meta: TensorMeta
    offset: int
    digest: int | None = None


class Bucket(msgspec.Struct, frozen=True, tag=True):
    tensors: list[Item]


class End(msgspec.Struct, frozen=True, tag=True):
    version: str | None = None


class Answer(msgspec.Struct, frozen=True):
    fault: Fault | None = None
    version: str | None = None


Message = Buffer | Bucket | End


def message_of(data: bytes) -> Message:
    """A message of a `ColocateSender`, or of the trainer of vLLM's example, which pickles. Raises
    `TransportError` for anything else."""
    try:
        if data[:1] == pickle.PROTO:
            return _foreign(_Known(BytesIO(data)).load())
        return decode(data, Message)  # type: ignore[arg-type]
    except PlanError:
        raise
    except Exception as error:
        raise TransportError(
            f"what came is no message of a ColocateSender, or of vLLM's rlhf_colocate.py: {error}",
            next_step="send with instep.dropin.vllm_rlhf.ColocateSender",
        ) from error


class _Known(pickle.Unpickler):
    """Opens handles, dtypes and sizes. Nothing that a pickle names is called."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_BYTES:
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" or module.startswith(("torch.storage", "torch.multiprocessing.reductions", "torch.cuda")):
            return name  # text: what is made with it ends in a TypeError
        raise pickle.UnpicklingError(f"it names {module}.{name}, and pickles are opened only as far as vLLM's example needs it")


def _foreign(payload: Any) -> Message:
    """What the example sends: a handle, a list of where tensors lie, and None at the end."""
    if payload is None:
        return End()
    if isinstance(payload, tuple):
        what, fields = payload
        return Buffer((what, list(fields)))
    return Bucket(
        [Item(TensorMeta(one["name"], dtype_name(dtype_of(one["dtype"])), tuple(one["shape"])), one["offset"]) for one in payload]
    )


class Line:
    """A ZMQ socket whose waits end: at a deadline, and when the other side's process is gone."""

    def __init__(self, socket: Any, other: str) -> None:
        import zmq

        self.socket, self.other, self.gone = socket, other, False
        self.path: Path | None = None
        self.since: float | None = None  # the address is there
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)

    def connect(self, address: str) -> None:
        self.path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        self.socket.connect(address)

    def send(self, message: Any, seconds: float, silent: str) -> None:
        """Raises `TransportError`: `silent` after so many seconds without another side, or that it
        is gone."""
        import zmq

        self._wait(seconds, zmq.POLLOUT, silent)
        self.socket.send(encode(message))

    def receive(self, seconds: float, silent: str) -> bytes:
        """The next message. Raises as `send` does."""
        import zmq

        self._wait(seconds, zmq.POLLIN, silent)
        data: bytes = self.socket.recv_multipart()[0]
        return data

    def _wait(self, seconds: float, event: int, silent: str) -> None:
        end = time.monotonic() + seconds
        while not self.socket.poll(max(0, int(1000 * min(LOOK, end - time.monotonic()))), event):
            if self._is_gone() and not self.socket.poll(0, event):
                raise TransportError(f"{self.other} is gone: its end of the connection was closed", next_step="start an update anew")
            if time.monotonic() > end:
                raise TransportError(silent)

    def _is_gone(self) -> bool:
        """Whether the other side has left, or has died before: then its address is there for a
        while and does not answer.

        An address that is no `ColocateSender`'s may be of an earlier run, and in use again in a
        moment.
        """
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        there, refused = self.path is not None and self.path.exists(), False
        while self.monitor.poll(0):
            left = recv_monitor_message(self.monitor)["event"] == zmq.EVENT_DISCONNECTED
            self.gone, refused = self.gone or left, refused or not left
        self.since = (self.since or time.monotonic()) if there else None
        if refused and self.since is not None and self.path is not None:  # since the look before this one, and it was there then
            own = self.path.parent.name.startswith(FOLDER)
            self.gone |= time.monotonic() - self.since > (2 * LOOK if own else GRACE)
        return self.gone

    def refuse(self, error: Exception) -> None:
        """Answers a trainer that waits; one that was silent is not waited for.

        In two parts: the trainer of vLLM's own example reads one, looks at none, and would go on
        for ever. Its next call fails so.
        """
        import zmq

        with suppress(zmq.ZMQError):
            answer = encode(Answer(fault_of(error, otherwise="ApplyError")))
            self.socket.send_multipart([answer, b"refused"], zmq.NOBLOCK)


@contextmanager
def open_line(kind: str, other: str, linger: int) -> Iterator[Line]:
    """kind: `REQ` or `REP`. other: what the other side is called. linger: milliseconds for a last
    message to leave."""
    with needed_by("an update over shared memory"):
        import zmq

    socket: Any
    with zmq.Context.instance().socket(getattr(zmq, kind)) as socket:
        socket.linger = linger
        line = Line(socket, other)
        try:
            yield line
        finally:
            with suppress(zmq.ZMQError):  # it is closed already: collected, or its context was ended
                socket.disable_monitor()
            line.monitor.close()
