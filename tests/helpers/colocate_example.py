"""The trainer half of vLLM's `rlhf_colocate.py` in our words, over shared memory in the place of a GPU's. It looks at no answer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from instep.dropin.handles import SEGMENT
from instep.transport.shm.segment import Segment

ALIGN = 256
REQ, RCVTIMEO, SNDTIMEO = 3, 27, 28  # zmq's


class TrainingActor:
    """device: what the worker on the same GPU reports; for a CPU it has to be told. stop_after: buckets, after which it is silent.

    deadline: milliseconds for each of its socket's calls, as our documentation asks for; None, as in the example, for ever.
    """

    def __init__(self, device: str, folder: str, stop_after: int | None = None, deadline: int | None = None) -> None:
        import zmq

        self.device_uuid, self.folder, self.stop_after, self.deadline = device, folder, stop_after, deadline
        self.zmq_context = zmq.Context()
        self.counter = 0
        self.weights: list[tuple[str, torch.Tensor]] = []

    def has(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights = [(name, tensor.detach()) for name, tensor in weights]

    def report_device_id(self) -> str:
        return self.device_uuid

    def get_zmq_handles(self) -> dict[str, str]:
        self.zmq_handle = f"ipc://{self.folder}/{self.device_uuid}-{self.counter}.sock"
        self.counter += 1
        return {self.device_uuid: self.zmq_handle}

    def update_weights(self) -> None:
        segment = Segment(2 * max(_padded(p) for _, p in self.weights))
        buffer = torch.from_numpy(segment.view)
        s: Any = self.zmq_context.socket(REQ)
        if self.deadline is not None:
            s.setsockopt(RCVTIMEO, self.deadline)
            s.setsockopt(SNDTIMEO, self.deadline)
        s.bind(self.zmq_handle)
        try:
            s.send_pyobj((SEGMENT, (segment.name, segment.size)))
            s.recv()
            for number, (rows, tensors) in enumerate(self._buckets(segment.size)):
                if number == self.stop_after:
                    time.sleep(600)
                for row, p in zip(rows, tensors, strict=True):
                    buffer[row["offset"] : row["offset"] + p.nbytes] = p.reshape(-1).view(torch.uint8)
                s.send_pyobj(rows)
                s.recv()
            s.send_pyobj(None)
            s.recv()
        finally:
            s.close(linger=0)
            del buffer
            segment.close()

    def leave(self) -> None:
        self.zmq_context.destroy(linger=0)

    def _buckets(self, room: int) -> list[tuple[list[dict[str, Any]], list[torch.Tensor]]]:
        found: list[tuple[list[dict[str, Any]], list[torch.Tensor]]] = [([], [])]
        offset = 0
        for name, p in self.weights:
            if offset + _padded(p) > room:
                found.append(([], []))
                offset = 0
            found[-1][0].append({"name": name, "dtype": p.dtype, "shape": p.shape, "offset": offset})
            found[-1][1].append(p)
            offset += _padded(p)
        return found


def _padded(p: torch.Tensor) -> int:
    return -(-p.nbytes // ALIGN) * ALIGN
