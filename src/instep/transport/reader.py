"""What a worker sees of a published version: bytes that lie where it can read them, that it pulls
out of a GPU's memory, or that pass by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from instep.digest import Words
from instep.plan.rows import Rows
from instep.protocol import TensorMeta


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

    @staticmethod
    def brief(nbytes: int) -> bool:  # noqa: ARG004
        """Whether a version of `nbytes` bytes is opened, and sums itself up, in less time than a
        thread takes to start."""
        return False

    split = False
    """Whether `arrive` looks at this worker's share alone, and takes the other bytes for zeros."""

    @abstractmethod
    def arrive(self, tensors: list[TensorMeta]) -> dict[str, int]:
        """Does what can be done beside the engine's steps. Returns digests of what has arrived."""

    def stop(self) -> None:  # noqa: B027  (most have nothing to stop)
        """Tells that nobody wants the version any more. An `arrive` that fetches by itself ends
        soon, with an error."""

    def close(self) -> bool:
        """Gives up the version's memory: no view may be used afterwards. Returns False while
        somebody still has a view; then `close` can be called again."""
        return True


class Visible(Reader):
    """Bytes in the worker's own address space. They can be looked through before the commit,
    without moving them.

    flat, offsets: the version as one run of bytes, and where each tensor that is no alias begins in
    it. None where the tensors lie apart.
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
        """Starts a copy of a tensor to the engine's own GPU, summed up on the way, and returns
        it."""

    @abstractmethod
    def tensors(self, metas: Sequence[TensorMeta]) -> Iterator[torch.Tensor]:
        """Yields what `tensor` returns for each, with one copy for many of them."""

    @abstractmethod
    def sums(self) -> dict[str, int]:
        """Waits for the copies that `tensor` and `tensors` have started. Returns their sums, by
        tensor."""


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
