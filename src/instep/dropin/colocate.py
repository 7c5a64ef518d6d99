"""Trainer and worker on one GPU: the trainer fills a shared buffer again and again, and the worker
takes tensors out of it.

sender.get_zmq_handles()                           {device: address}
sender.update_weights()     buffer ───────────▶    update_weights_from_ipc(handles)
                            tensors' places ──▶    copies them, then answers: the buffer may be filled again
                            ...
                            end ──────────────▶    commits all of them, then answers
"""

from __future__ import annotations

from contextlib import suppress

import torch

from instep.dropin.calls import by_all
from instep.dropin.colocate_wire import Answer, Bucket, Buffer, End, Line, Message, message_of, open_line
from instep.dropin.communicator import DEADLINE, dtype_of
from instep.dropin.extension import RoundsExtension, rounds_of
from instep.dropin.handles import device_id, mine, rebuild_ipc
from instep.dropin.rounds import Rounds
from instep.errors import PlanError, TransportError
from instep.protocol import WorkerReceipt


class ColocateWorkerExtension(RoundsExtension):
    """vLLM's worker with the methods of the colocated example."""

    instep_cast = True

    def report_device_id(self) -> str:
        """What trainers on this worker's GPU report too."""
        return device_id(self.device)  # type: ignore[attr-defined]

    @by_all
    def update_weights_from_ipc(self, zmq_handles: dict[str, str], timeout: float = DEADLINE) -> WorkerReceipt:
        """Takes one update from the sender at this device's address.

        timeout: seconds that the sender may be silent. Then, and after anything that is wrong, the
        old weights serve on.
        """
        return self.instep_follow(rounds_of(self), zmq_handles, timeout)

    def instep_follow(self, rounds: Rounds, zmq_handles: dict[str, str], timeout: float) -> WorkerReceipt:
        rounds.begin()
        rounds.peers.timeout = min(timeout, DEADLINE)
        with open_line("REP", "the trainer", linger=1000) as line:  # for the last answer to leave
            try:
                line.connect(mine(zmq_handles, self.report_device_id()))
                version = self._take_all(rounds, line, timeout)
            except Exception as error:
                line.refuse(error)
                rounds.drop(error)
                raise
            try:
                receipt = rounds.finish(version)
            except Exception as error:
                line.refuse(error)
                raise
            with suppress(TransportError):  # a trainer that left without it hears nothing
                line.send(Answer(version=rounds.receiver.version), 1.0, "the trainer does not take the last answer")
            return receipt

    def _take_all(self, rounds: Rounds, line: Line, timeout: float) -> str | None:
        """Takes tensors until the trainer says that there are no more. The label that it wants."""
        buffer: torch.Tensor | None = None
        silent = f"the trainer was silent for {timeout:g} s"
        while True:
            message: Message = message_of(line.receive(timeout, silent))
            if isinstance(message, End):
                return message.version
            if isinstance(message, Buffer):
                buffer = rebuild_ipc(message.handle, self.device.index)  # type: ignore[attr-defined]
            else:
                _take(rounds, message, buffer)
            line.send(Answer(), timeout, silent)


def _take(rounds: Rounds, bucket: Bucket, buffer: torch.Tensor | None) -> None:
    """Copies a bucket's tensors: the buffer may be filled again afterwards."""
    if buffer is None:
        raise TransportError("a bucket came before its buffer")
    for item in bucket.tensors:
        meta, end = item.meta, item.offset + item.meta.nbytes
        if meta.name in rounds.now.names:
            raise PlanError(f"{meta.name} came twice", tensor=meta.name)
        if not 0 <= item.offset <= end <= buffer.numel():
            raise PlanError(f"{meta.name} lies outside of the buffer of {buffer.numel()} bytes", tensor=meta.name)
        place = buffer[item.offset : end].view(dtype_of(meta.dtype)).view(meta.shape)
        rounds.add(meta.name, place.clone, digest=item.digest)
    if any(item.digest is None for item in bucket.tensors):  # vLLM's own trainer half, which hears of nothing that its last message shows
        rounds.check()
