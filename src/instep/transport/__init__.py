"""Transports: how a version's bytes get to the workers.

Each way is a folder with both of its ends: `publish.py` runs in the trainer, `read.py` in the engines' workers. `ways.py` has a line
for each.

The trainer publishes a version once, and workers open it and read. No collective: a dead or late engine delays nobody, and a new engine
catches up by opening the current version.

    shm/          POSIX shared memory, for engines on the trainer's host
    http/         HTTP, where nothing faster reaches an engine
    ipc/          CUDA IPC, for trainer and engines on GPUs of one host; export.py is what one process of a trainer shares

The trainer sends to all workers at once, bucket by bucket. For engines on other hosts.

    broadcast/    NCCL or Gloo, over a private group of group.py

In all of them:

    auto.py       which way a version takes, and why
    copying.py    a source copied into one run of bytes
    again.py      the second read, which shows that what was sent is of one moment
    mapped.py     a version that a worker has in its own address space
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch

from instep.digest import Words
from instep.plan.rows import Rows
from instep.protocol import Identity, Location, TensorMeta

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Published:
    """A version whose bytes can be opened. `digests` were taken from the published bytes, not from the trainer's."""

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
    """Whether commit requests carry no digests: workers read them by themselves, or they are complete only afterwards."""

    @property
    def digests_before_commit(self) -> bool:
        """Whether the digests are known before the commit."""

    def prefetch(self) -> None:
        """Optional: start work for the next version of the same source, before the source is looked at."""

    def why_not(self, device: torch.device, workers: Sequence[Identity]) -> str | None:
        """Returns the reason why this transport cannot bring the next publication, or None. The
        publication is made of tensors on `device`; `workers` will read it."""

    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """Makes a version available, each value cast to the dtype of its `TensorMeta`. Aliases have no value of their own.

        values: a `Placed`, or what can be iterated twice.

        Raises `TransportError` where there is no room, `SourceError` where a value does not fit its description, and where the second
        read of what is copied here gives other bytes than the first.
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


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker, as a transport sees it.

    timeout: seconds that it may wait for others in one step. device: PyTorch's name.
    share: (index, count): of bytes that all workers of the engine see, this one sums up part
    `index` of `count`.
    """

    incarnation: str
    timeout: float
    device: str = "cpu"
    share: tuple[int, int] = (0, 1)


class Reader(ABC):
    """A worker's view of one published version: `Visible`, `Remote` or `Passing`."""

    fetches = True
    """Whether there is anything to do before the commit."""

    at_once = False
    """Whether `arrive` takes less time than a thread takes to start."""

    split = False
    """Whether `arrive` looks at this worker's share alone, and takes the other bytes for zeros."""

    @abstractmethod
    def arrive(self, tensors: list[TensorMeta]) -> dict[str, int]:
        """Does what can be done beside the engine's steps. Returns digests of what has arrived."""

    def stop(self) -> None:  # noqa: B027  (most have nothing to stop)
        """Tells that nobody wants the version: an `arrive` that fetches ends soon, with an error."""

    def close(self) -> bool:
        """Gives up the version's memory: no view may be used afterwards. Returns False while
        somebody still has a view; then `close` can be called again."""
        return True


class Visible(Reader):
    """Bytes in the worker's own address space. They can be looked through before the commit, without moving them.

    flat, offsets: the version as one run of bytes, and where each tensor that is no alias begins in it. None where the tensors lie apart.
    """

    flat: torch.Tensor | None = None
    offsets: Mapping[str, int]

    @abstractmethod
    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        """Returns a view of the published bytes, which must not be written to."""


class Remote(Reader):
    """Bytes in the memory of a GPU that another process owns. The commit pulls them.

    bases: the addresses in this process at which the trainer's allocations are mapped.
    """

    device: torch.device
    bases: list[int]

    @abstractmethod
    def wait_for(self, launch: int) -> None:
        """Waits until the trainer has computed its own sums of a launch. Nothing may be pulled
        before."""

    @abstractmethod
    def board(self) -> tuple[Sequence[str], Words]:
        """Returns the trainer's own sums, and the names of their tensors in the same order; none
        where they cannot be read."""

    def told(self) -> dict[str, int]:
        """Returns what `board` does, by tensor."""
        names, sums = self.board()
        return dict(zip(names, sums.tolist(), strict=True))

    @abstractmethod
    def places(self, meta: TensorMeta) -> list[Rows]:
        """Returns where the parts of a tensor are mapped in this process, in words of 8 bytes."""

    @abstractmethod
    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        """Starts a copy of a tensor to the engine's own GPU, summed up on the way, and returns it."""

    @abstractmethod
    def tensors(self, metas: Sequence[TensorMeta]) -> Iterator[torch.Tensor]:
        """Yields what `tensor` returns for each, with one copy for many of them."""

    @abstractmethod
    def sums(self) -> dict[str, int]:
        """Waits for the copies that `tensor` and `tensors` have started and returns their sums, by tensor."""


class Passing(Reader):
    """Bytes that the trainer sends during the commit, in buckets.

    parts: the memory of each bucket, in order. Two buckets share one piece of memory in turns.
    """

    device: torch.device
    parts: Sequence[torch.Tensor]

    @abstractmethod
    def begin(self) -> None:
        """Returns when every worker and the trainer take part, and the first bucket is there."""

    @abstractmethod
    def each(self, *, ahead: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields each bucket with its index. A bucket is valid until the next but one. ahead: other
        buckets may travel meanwhile."""

    @abstractmethod
    def told(self) -> dict[str, int]:
        """Receives the trainer's own sums, by tensor. They follow the last bucket."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until this worker's GPU has done what it was asked for."""


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
