"""The choice of a transport, made anew whenever something that it depends on is known, and told with its reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Set
from itertools import chain

import torch

from instep.errors import TransportError
from instep.protocol import Identity, TensorMeta
from instep.transport import Published, host
from instep.transport.ipc import IpcTransport
from instep.transport.shm import ShmTransport

logger = logging.getLogger("instep")


class AutoTransport:
    """CUDA IPC where the trainer's tensors and all engines are on GPUs of one host, shared memory otherwise."""

    def __init__(self) -> None:
        self.shm = ShmTransport()
        self.ipc = IpcTransport()
        self.engines: Sequence[Identity] = ()
        self.refused: str | None = None
        self.told: str | None = None

    def consider(self, engines: Sequence[Identity]) -> None:
        self.engines = engines

    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        values = iter(values)
        first = next(values, None)
        everything = values if first is None else chain([first], values)
        against = self.refused or (why_not_ipc(first[1].device, self.engines) if first else "the source is empty")
        if against is None:
            held = list(everything)
            try:
                published = self.ipc.publish(tensors, held)
            except TransportError as error:
                self.give_up(error)
                everything = iter(held)
            else:
                self._tell("ipc: trainer and engines are on GPUs of one host")
                return published
        self._tell(f"shm: {self.refused or against}")
        return self.shm.publish(tensors, everything)

    def finish(self, published: Published) -> Published:
        return (self.ipc if published.location.transport == "ipc" else self.shm).finish(published)

    def give_up(self, error: TransportError) -> None:
        """From now on CUDA IPC is left alone."""
        self.refused = str(error.args[0])

    def release_all_but(self, held: Set[str]) -> None:
        self.shm.release_all_but(held)

    def close(self) -> None:
        self.shm.close()
        self.ipc.close()

    def _tell(self, choice: str) -> None:
        if choice != self.told:
            logger.info("transport %s", choice)
            self.told = choice


def why_not_ipc(source: torch.device, engines: Sequence[Identity]) -> str | None:
    """The reason against CUDA IPC, or None."""
    if source.type != "cuda":
        return f"the trainer's tensors are on {source.type}"
    for engine in engines:
        if not engine.device.startswith("cuda"):
            return f"an engine's worker is on {engine.device}"
        if engine.host != host():
            return "an engine is on another host"
    return None
