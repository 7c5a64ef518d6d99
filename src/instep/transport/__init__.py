"""Transports: how a version's bytes get to the workers.

Publish and pull: the trainer publishes a version once, workers open it and read. No collective, so a dead or late engine delays nobody
and a new engine catches up by opening the current version.

    auto.py  which one, and why
    shm.py   POSIX shared memory, for engines on the trainer's host
    ipc.py   CUDA IPC, for trainer and engines on GPUs of one host; driver.py is what it asks of CUDA
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from instep.errors import TransportError
from instep.protocol import Location, Manifest, TensorMeta


@dataclass(frozen=True, slots=True)
class Published:
    """A version whose bytes can be opened. `digests` were taken from the published bytes, not from the trainer's."""

    location: Location
    digests: dict[str, int]
    non_finite: tuple[str, ...] = field(default=())
    """Tensors with a NaN or an infinity. They are sent all the same."""


class Transport(Protocol):
    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """Copies every value once, cast to the dtype of its `TensorMeta`. Aliases have no value of their own.

        Raises `TransportError` where there is no room, `SourceError` where a value does not fit its description.
        """

    def finish(self, published: Published) -> Published:
        """With the digests, where they were still being taken when `publish` returned."""

    def release_all_but(self, held: Set[str]) -> None:
        """Engines have left every publication but those with an address in `held`: their memory may be used for the next."""

    def close(self) -> None: ...


class Reader(Protocol):
    """A worker's view of one published version."""

    arrived: bool
    """Whether the bytes can be looked through before the commit, without moving them."""

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        """A read-only view of the published bytes: writing to it is a crash."""

    def digests(self, tensors: list[TensorMeta]) -> dict[str, int]:
        """Of bytes that have arrived."""

    def close(self) -> bool:
        """No view may be used afterwards. False while somebody still has one: then it can be called again."""


def open_location(manifest: Manifest) -> Any:
    """The reader for a manifest. Raises `TransportError` where it cannot be opened from this process."""
    from instep.transport.ipc import IpcReader
    from instep.transport.shm import ShmReader

    readers = {"shm": ShmReader, "ipc": IpcReader}
    kind = manifest.location.transport
    if kind not in readers:
        raise TransportError(f"this worker does not know the transport {kind!r}; known: {', '.join(readers)}")
    return readers[kind](manifest)


def host() -> str:
    """Equal for processes that may share memory: the kernel's boot, which containers of a host share."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
