"""The trainer's half of an update through a buffer on the GPU that it shares with a worker: see
`colocate.py`."""

from __future__ import annotations

import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from instep.dropin.colocate_wire import FOLDER, Answer, Bucket, Buffer, End, Item, Line, Message, open_line
from instep.dropin.communicator import DEADLINE, sum_of
from instep.dropin.handles import SEGMENT, device_id, share
from instep.errors import SourceError, TransportError
from instep.faults import error_of
from instep.protocol import decode
from instep.source import again, device_of, open_source
from instep.transport import Placed
from instep.transport.again import second
from instep.transport.shm.segment import Segment

ALIGN = 256  # so that any dtype can be viewed where a tensor begins


class ColocateSender:
    """The trainer's half, one for each GPU that it shares with a worker.

    source: a module, a mapping or anything else that a `WeightSync` takes.
    device_id: what the worker reports; for a GPU it need not be given.
    timeout: seconds to wait for each answer.
    """

    def __init__(self, source: Any, device_id: str | None = None, timeout: float = DEADLINE) -> None:
        self.source, self.device_id, self.timeout = open_source(source), device_id, timeout
        self._open: Callable[[], object] | None = None
        self._line: Line

    def report_device_id(self) -> str:
        if self.device_id is None:
            self.device_id = device_id(device_of(self.source))
        return self.device_id

    def get_zmq_handles(self) -> dict[str, str]:
        """An address for the worker, in a folder that no other user can enter. It serves one
        update."""
        self.close()
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER))
            self._line = stack.enter_context(open_line("REQ", f"the worker on {self.report_device_id()}", linger=0))
            address = f"ipc://{Path(folder) / uuid.uuid4().hex[:8]}"
            self._line.socket.bind(address)
            self._open = weakref.finalize(self, stack.pop_all().close)  # also when nobody holds the sender any more
        return {self.report_device_id(): address}

    def update_weights(self, version: str | None = None) -> str:
        """Sends the source's weights of this moment. The version's label, when the engine serves
        it.

        Raises what the worker says went wrong, `TransportError` where it does not answer in time,
        and `SourceError` where the weights changed meanwhile. The engine serves what it served
        then, unless the error says that it is dirty.
        """
        if self._open is None:
            raise TransportError(
                "no worker has an address", next_step="call get_zmq_handles() before each update, and give it to the engine"
            )
        try:
            with torch.no_grad(), self._buffer() as (buffer, handle):
                self._ask(Buffer(handle))
                sent: dict[str, int] = {}
                for bucket in self._buckets(buffer):
                    self._ask(Bucket(bucket))
                    sent |= {one.meta.name: one.digest or 0 for one in bucket}
                self._read_again(sent)
            label = self._ask(End(version)).version
        finally:
            self.close()
        return label or ""

    def close(self) -> None:
        """Frees the address."""
        if self._open is not None:
            self._open()
            self._open = None

    def _ask(self, message: Message) -> Answer:
        silent = f"the worker on {self.device_id} did not answer {type(message).__name__} within {self.timeout:g} s"
        self._line.send(message, self.timeout, silent)  # nobody is connected yet, as long as the worker does not come
        reply = decode(self._line.receive(self.timeout, silent), Answer)
        if reply.fault is not None:
            raise error_of(reply.fault, f"the worker on {self.device_id}: ")
        return reply

    @contextmanager
    def _buffer(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Twice the largest tensor, on the device of the source."""
        size = 2 * max(_padded(meta.nbytes) for meta in self.source.metadata())
        device = device_of(self.source)
        if device.type == "cuda":
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            yield buffer, share(buffer)
            return
        segment = Segment(size)
        try:
            yield torch.from_numpy(segment.view[:size]), (SEGMENT, [segment.name, size])
        finally:
            segment.close()

    def _read_again(self, sent: Mapping[str, int]) -> None:
        """sent: digests. Before the worker is told to take what it has."""
        for meta, value in second(self.source.metadata(), Placed(self.source.tensors, lambda: again(self.source))):
            if sum_of(value.contiguous(), meta) != sent[meta.name]:
                raise SourceError.changed(meta.name)

    def _buckets(self, buffer: torch.Tensor) -> Iterator[list[Item]]:
        """Fills the buffer in the source's order, as often as needed; it must be free again when
        the next bucket is asked for."""
        filled: list[Item] = []
        offset = 0
        metas = {meta.name: meta for meta in self.source.metadata()}
        for name, value in self.source.tensors():
            meta = metas[name]
            if offset + _padded(meta.nbytes) > buffer.numel():
                yield _settled(buffer, filled)
                filled, offset = [], 0
            place = buffer[offset : offset + meta.nbytes].view(value.dtype).view(meta.shape)
            place.copy_(value, non_blocking=True)
            filled.append(Item(meta, offset, sum_of(place, meta)))
            offset += _padded(meta.nbytes)
        yield _settled(buffer, filled)


def _settled(buffer: torch.Tensor, filled: list[Item]) -> list[Item]:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return filled


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
