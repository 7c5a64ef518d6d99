"""Trainer and worker on one GPU: the trainer fills a shared buffer again and again, and the worker takes tensors out of it.

sender.get_zmq_handles()                           {device: address}
sender.update_weights()     buffer ───────────▶    update_weights_from_ipc(handles)
                            tensors' places ──▶    copies them, then answers: the buffer may be filled again
                            ...
                            end ──────────────▶    commits all of them, then answers
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from instep.dropin.communicator import DEADLINE, dtype_of, sum_of
from instep.dropin.extension import RoundsExtension, Status, answer
from instep.dropin.handles import SEGMENT, device_id, mine, rebuild_ipc, share
from instep.dropin.rounds import Rounds
from instep.dropin.together import as_instep
from instep.errors import PlanError, SourceError, TransportError, by_name
from instep.extras import needed_by
from instep.protocol import Fault, TensorMeta, WorkerReceipt, decode, encode
from instep.source import again, device_of, open_source
from instep.transport import Placed
from instep.transport.again import second
from instep.transport.shm import Segment

ALIGN = 256  # so that any dtype can be viewed where a tensor begins


class Buffer(msgspec.Struct, frozen=True, tag=True):
    """A flat buffer of bytes, by a handle of `handles.py`."""

    handle: tuple[str, list[Any]]


class FlattenedTensorMetadata(msgspec.Struct, frozen=True):
    """Where a tensor lies in the buffer (offset in bytes), and its digest."""

    meta: TensorMeta
    offset: int
    digest: int


class Bucket(msgspec.Struct, frozen=True, tag=True):
    tensors: list[FlattenedTensorMetadata]


class End(msgspec.Struct, frozen=True, tag=True):
    version: str | None = None


class Answer(msgspec.Struct, frozen=True):
    fault: Fault | None = None
    version: str | None = None


Message = Buffer | Bucket | End


class ColocateSender:
    """The trainer's half, one for each GPU that it shares with a worker.

    source: a module, a mapping or anything else that a `WeightSync` takes.
    device_id: what the worker reports; for a GPU it need not be given.
    timeout: seconds to wait for each answer.
    """

    def __init__(self, source: Any, device_id: str | None = None, timeout: float = DEADLINE) -> None:
        self.source, self.device_id, self.timeout = open_source(source), device_id, timeout
        self._open: ExitStack | None = None
        self._socket: Any = None

    def report_device_id(self) -> str:
        if self.device_id is None:
            self.device_id = device_id(device_of(self.source))
        return self.device_id

    def get_zmq_handles(self) -> dict[str, str]:
        """An address for the worker, in a folder that no other user can enter. It serves one update."""
        with needed_by("a ColocateSender"):
            import zmq

        self.close()
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="instep-"))
            self._socket = stack.enter_context(zmq.Context.instance().socket(zmq.REQ))
            self._socket.linger = 0
            address = f"ipc://{Path(folder) / uuid.uuid4().hex[:8]}"
            self._socket.bind(address)
            self._open = stack.pop_all()
        return {self.report_device_id(): address}

    def update_weights(self, version: str | None = None) -> str:
        """Sends the source's weights of this moment. The version's label, when the engine serves it.

        Raises what the worker says went wrong, `TransportError` where it does not answer in time, and `SourceError` where the weights
        changed meanwhile. The engine serves what it served then, unless the error says that it is dirty.
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
                    sent |= {one.meta.name: one.digest for one in bucket}
                self._read_again(sent)
            label = self._ask(End(version)).version
        finally:
            self.close()
        return label or ""

    def close(self) -> None:
        """Frees the address."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _ask(self, message: Message) -> Answer:
        import zmq

        milliseconds = int(1000 * self.timeout)
        reached = self._socket.poll(milliseconds, zmq.POLLOUT)  # nobody is connected yet, as long as the worker does not come
        if reached:
            self._socket.send(encode(message))
        if not reached or not self._socket.poll(milliseconds):
            raise TransportError(f"the worker on {self.device_id} did not answer {type(message).__name__} within {self.timeout:g} s")
        reply = decode(self._socket.recv_multipart()[0], Answer)
        if reply.fault is not None:
            raise by_name(reply.fault.kind)(f"the worker on {self.device_id}: {reply.fault.message}", tensor=reply.fault.tensor)
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

    def _buckets(self, buffer: torch.Tensor) -> Iterator[list[FlattenedTensorMetadata]]:
        """Fills the buffer in the source's order, as often as needed; it must be free again when the next bucket is asked for."""
        filled: list[FlattenedTensorMetadata] = []
        offset = 0
        metas = {meta.name: meta for meta in self.source.metadata()}
        for name, value in self.source.tensors():
            meta = metas[name]
            if offset + _padded(meta.nbytes) > buffer.numel():
                yield _settled(buffer, filled)
                filled, offset = [], 0
            place = buffer[offset : offset + meta.nbytes].view(value.dtype).view(meta.shape)
            place.copy_(value, non_blocking=True)
            filled.append(FlattenedTensorMetadata(meta, offset, sum_of(place, meta)))
            offset += _padded(meta.nbytes)
        yield _settled(buffer, filled)


class ColocateWorkerExtension(RoundsExtension):
    """vLLM's worker with the methods of the colocated example."""

    instep_cast = True

    def report_device_id(self) -> str:
        """What trainers on this worker's GPU report too."""
        return device_id(self.device)  # type: ignore[attr-defined]

    def update_weights_from_ipc(self, zmq_handles: dict[str, str], timeout: float = DEADLINE) -> Status:
        """Takes one update from the sender at this device's address.

        timeout: seconds that the sender may be silent. Then, and after anything that is wrong, the old weights serve on.
        """
        return answer(self, lambda rounds: self.instep_follow(rounds, zmq_handles, timeout))

    def instep_follow(self, rounds: Rounds, zmq_handles: dict[str, str], timeout: float) -> WorkerReceipt:
        import zmq

        socket: Any
        buffer: torch.Tensor | None = None
        rounds.begin()
        rounds.peers.timeout = min(timeout, DEADLINE)
        with zmq.Context.instance().socket(zmq.REP) as socket:
            socket.linger = 1000  # milliseconds, for the last answer to leave
            try:
                socket.connect(mine(zmq_handles, self.report_device_id()))
                while True:
                    if not socket.poll(int(1000 * timeout)):
                        raise TransportError(f"the trainer was silent for {timeout:g} s")
                    message = _message(socket.recv())
                    if isinstance(message, End):
                        break
                    if isinstance(message, Buffer):
                        buffer = rebuild_ipc(message.handle, self.device.index)  # type: ignore[attr-defined]
                    else:
                        _take(rounds, message, buffer)
                    socket.send(encode(Answer()))
            except Exception as error:
                _refuse(socket, error)
                rounds.drop(error)
                raise
            try:
                receipt = rounds.finish(message.version)
            except Exception as error:
                _refuse(socket, error)
                raise
            socket.send(encode(Answer(version=rounds.receiver.version)))
            return receipt


def _message(data: bytes) -> Message:
    try:
        return decode(data, Message)  # type: ignore[arg-type]
    except msgspec.DecodeError as error:
        raise TransportError(
            f"what came is no message of a ColocateSender ({error}); pickles are not opened",
            next_step="send with instep.dropin.vllm_rlhf.ColocateSender",
        ) from error


def _take(rounds: Rounds, bucket: Bucket, buffer: torch.Tensor | None) -> None:
    """Copies a bucket's tensors: the buffer may be filled again afterwards."""
    if buffer is None:
        raise TransportError("a bucket came before its buffer")
    for item in bucket.tensors:
        meta, end = item.meta, item.offset + item.meta.nbytes
        if meta.name in rounds.names:
            raise PlanError(f"{meta.name} came twice", tensor=meta.name)
        if not 0 <= item.offset <= end <= buffer.numel():
            raise PlanError(f"{meta.name} lies outside of the buffer of {buffer.numel()} bytes", tensor=meta.name)
        place = buffer[item.offset : end].view(dtype_of(meta.dtype)).view(meta.shape)
        rounds.add(meta.name, place.clone, digest=item.digest)


def _refuse(socket: Any, error: Exception) -> None:
    """Answers a trainer that waits; one that was silent is not waited for.

    In two parts: the trainer of vLLM's own example reads one, looks at none, and would go on for ever. Its next call fails so.
    """
    import zmq

    fault = as_instep(error)
    with suppress(zmq.ZMQError):
        answer = encode(Answer(Fault(type(fault).__name__, str(fault.args[0]), fault.tensor)))
        socket.send_multipart([answer, b"refused"], zmq.NOBLOCK)


def _settled(buffer: torch.Tensor, filled: list[FlattenedTensorMetadata]) -> list[FlattenedTensorMetadata]:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return filled


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
