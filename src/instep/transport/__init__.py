"""Transports: how a version's bytes get to the workers.

Each is a folder with both of its ends: `publish.py` runs in the trainer, `read.py` in the engines'
workers. `registry.py` has a line for each.

The trainer publishes a version once, and workers open it and read. No collective: a dead or late
engine delays nobody, and a new engine catches up by opening the current version.

    shm/          POSIX shared memory, for engines on the trainer's host
    http/         HTTP, where nothing faster reaches an engine
    ipc/          CUDA IPC, for trainer and engines on GPUs of one host; export.py is what one process of a trainer shares

The trainer sends to all workers at once, bucket by bucket. For engines on other hosts.

    broadcast/    NCCL or Gloo, over a private group of group.py

What they share:

    reader.py     what a worker sees of a published version
    auto.py       which transport a version takes, and why
    copying.py    a source copied into one run of bytes, for shm and http
    mapped.py     such a run in a worker's own address space
    bucket_digests.py  what goes into buckets and comes out of them, summed up on the way
    again.py      the second read, which shows that what was sent is of one moment
    parts.py      tensors as parts of memory, for ipc
    store.py      the key-value store through which ranks of a group find each other (group.py)
    addresses.py, cast.py  where a tensor lies, and tensors in the dtype to send
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch

from instep.protocol import Identity, Location, TensorMeta

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Published:
    """A version whose bytes can be opened. `digests` were taken from the published bytes, not from
    the trainer's."""

    location: Location
    digests: dict[str, int]
    non_finite: tuple[str, ...] = field(default=())
    """Tensors with a NaN or an infinity. They are sent all the same."""
    launch: int = 0
    """The launch whose sums workers read by themselves (see `ipc.export.Exposed`), or 0."""


Read = Callable[[], Iterator[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Placed:
    """A source's tensors with their names, read anew by each call.

    read, again: the first and the second read of a version. The second one shows that nothing has
    changed meanwhile; there None stands for a value that the source has compared by itself.
    stays: whether the source leaves a value alone while others are asked for.
    place: if it equals that of an earlier version, every tensor lies where it lay then. None if
    that is not known.
    digests: those that a version must have which is sent once more. None for a new version.
    told: takes how many bytes were read in another way than by `read`.
    """

    read: Read
    again: Callable[[], Iterator[tuple[str, torch.Tensor | None]]]
    stays: bool = False
    place: Hashable = None
    digests: Mapping[str, int] | None = None
    told: Callable[[int], None] = lambda _: None

    @classmethod
    def of(cls, values: Placed | Iterable[tuple[str, torch.Tensor]]) -> Placed:
        """Wraps what can be iterated twice; a `Placed` is returned as it is."""
        return values if isinstance(values, Placed) else cls(values.__iter__, values.__iter__)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.read()


class Sending(Protocol):
    """What the trainer does while workers take a step of a push."""

    async def abort_on_failure(self, step: Awaitable[T]) -> T:
        """Waits for a worker's step. If the step fails, other workers stop waiting for bytes
        too."""


class Transport(Protocol):
    """The trainer's side. It publishes a version, workers read the version while `serving` lasts,
    then its memory is released for another."""

    digests_apart: bool
    """Whether commit requests carry no digests: workers read them by themselves, or they are
    complete only afterwards."""

    @property
    def digests_before_commit(self) -> bool:
        """Whether the digests are known before the commit."""

    def prefetch(self) -> None:
        """Optional: start work for the next version of the same source, before the source is looked
        at."""

    def why_not(self, device: torch.device, workers: Sequence[Identity]) -> str | None:
        """Returns the reason why this transport cannot bring the next publication, or None. The
        publication is made of tensors on `device`; `workers` will read it.

        Called before each `publish`, which may use what was noted of the workers here. Workers that
        were never named may open a publication later (`catch_up`), unless it is live.
        """

    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """Makes a version available, each value cast to the dtype of its `TensorMeta`. Aliases have
        no value of their own.

        values: a `Placed`, or what can be iterated twice.

        Raises `TransportError` where there is no room, `SourceError` where a value does not fit its
        description, and where the second read of what is copied here gives other bytes than the
        first.
        """

    def serving(self, step: str) -> Any:
        """Returns an asynchronous context manager that yields a `Sending`. It is entered while
        workers take the step `prepare` or `commit`."""

    def finish(self, published: Published) -> Published:
        """Returns `published` with its digests. Waits for them where they were still being computed
        when `publish` returned."""

    def release_all_but(self, held: Set[str]) -> None:
        """Releases the memory of each publication whose address is not in `held`, for the next one.
        Engines have left those."""

    def close(self) -> None: ...


class Pull:
    """The part of a transport whose workers read by themselves."""

    digests_apart, digests_before_commit = False, True

    def prefetch(self) -> None: ...

    @asynccontextmanager
    async def serving(self, _: str) -> AsyncIterator[Sending]:
        yield self

    async def abort_on_failure(self, step: Awaitable[T]) -> T:
        return await step


@lru_cache(maxsize=1)
def host() -> str:
    """Returns the kernel's boot id, which is equal for processes that may share memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def at_rest(device: torch.device) -> None:
    """Waits until a GPU has finished its work on all streams. A copy would wait for one stream
    alone."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def uuid_of(device: torch.device) -> str | None:
    """Returns a GPU's UUID, which is the same in every process whatever index the GPU has there.
    None for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def elsewhere(workers: Sequence[Identity]) -> str | None:
    """Returns the reason against transports that stay on one host, or None."""
    return "an engine is on another host" if any(worker.host != host() for worker in workers) else None
