"""The workers of one engine as one of them sees them: each says what it knows, and all come to one
end, without their trainer."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from instep.errors import ApplyError, InstepError, TransportError
from instep.faults import error_of, fault_of
from instep.protocol import Fault
from instep.receiver.state import Receiver

ALL = "all"
SOON, SELDOM = 0.0002, 0.005
"""Seconds between two looks for what the others say: a hundredth of the wait so far, within
these."""


class Silent(TransportError):
    """Workers did not say anything before the deadline."""


def receiver_of(worker: Any) -> Receiver | None:
    """Returns this worker's receiver; None until instep has called the worker."""
    receiver: Receiver | None = worker.__dict__.get("instep_receiver")
    return receiver


def rank_of(worker: Any) -> int:
    """Returns a worker's rank in its engine: under an external launcher vLLM counts over all
    engines."""
    rank: int = worker.rank % worker.vllm_config.parallel_config.world_size
    return rank


def speaks(worker: Any) -> bool:
    """Whether this worker raises the errors of all. Only the last one does, unless each worker
    has a caller of its own."""
    parallel = worker.vllm_config.parallel_config
    last: bool = rank_of(worker) == parallel.world_size - 1
    return last or parallel.distributed_executor_backend == "external_launcher"


class Peers:
    """Worker `rank` among the `size` workers of an engine.

    What is said goes through the store that vLLM's process group was built on. No collective: one
    that is cut short by a deadline leaves its group unusable, and vLLM needs it. All workers begin
    the same series of exchanges, one after the other.

    store: may be None where there is one worker. timeout: seconds that a worker waits for the
    others.
    """

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        self.rank, self.size, self.store, self.timeout = rank, size, store, timeout
        self.series = 0
        self.said: list[tuple[int, str]] = []  # the series and the key

    @classmethod
    def of(cls, worker: Any, purpose: str, timeout: float) -> Peers:
        """Returns the peers of a vLLM worker. Those with different purposes do not hear each
        other."""
        size: int = worker.vllm_config.parallel_config.world_size
        if size == 1:
            return cls(0, 1, None, timeout)
        first = torch_rank() - rank_of(worker)  # engines that run in parallel may share one store
        return cls(rank_of(worker), size, PrefixStore(f"instep {first} {purpose}", default_store()), timeout)

    def begin(self) -> int:
        """Begins the next series of exchanges, and returns its number. A worker that left the one
        before early is in step again."""
        self.series += 1
        while self.said and self.said[0][0] < self.series - 1:  # nobody asks for it any more
            self.store.delete_key(self.said.pop(0)[1])
        return self.series

    def exchange(self, topic: str, mine: bytes) -> list[bytes]:
        """Returns what every worker says about a topic, in the order of ranks. A topic comes once
        in a series.

        Raises `Silent` where a worker says nothing until the deadline: then in every worker that
        comes to this topic. Raises the error of a worker that has failed in this series and never
        comes to it.
        """
        if self.size == 1:
            return [mine]
        keys = [f"{self.series} {topic} {rank}" for rank in range(self.size)]
        self._say(keys[self.rank], mine)
        started = time.monotonic()
        while not self.store.check(keys):
            self._raise_failure()
            waited = time.monotonic() - started
            if waited > self.timeout:
                self._settle(topic, self._missing(keys))
                break
            time.sleep(min(max(SOON, waited / 100), SELDOM))
        else:
            self._settle(topic, ALL)
        return [self.store.get(key) for key in keys]

    def fail(self, error: Exception) -> None:
        """Tells the others that this worker goes no further in this series. The first to say that
        is heard."""
        if self.size > 1:
            key, text = f"{self.series} failed", f"{self.rank} " + _text(error)
            if self.store.compare_set(key, "", text).decode() == text:
                self.said.append((self.series, key))

    def end(self, error: InstepError | None) -> InstepError | None:
        """Tells how a call of all workers ended in this one: a series of its own. Returns the first
        error of all, in the order of ranks.

        An error of another worker begins with its rank. A worker that is silent until the deadline
        is an error too.
        """
        if self.size == 1:
            return error
        self.begin()
        try:
            ends = self.exchange("end", b"" if error is None else _text(error).encode())
        except Silent as silent:
            return error or silent
        faults = [(rank, end.decode()) for rank, end in enumerate(ends) if end]
        return next((error if rank == self.rank else _error(rank, text) for rank, text in faults), None)

    def _settle(self, topic: str, outcome: str) -> None:
        """Agrees whether all have come to a topic, in one step of the store: whoever sees all words
        and whoever gives up at the same moment go the same way."""
        key = f"{self.series} {topic} settled"
        if self.rank == 0:
            self.said.append((self.series, key))
        if (found := self.store.compare_set(key, "", outcome).decode()) != ALL:
            raise Silent(found)

    def _missing(self, keys: list[str]) -> str:
        missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        return f"nothing came from rank {', '.join(map(str, missing))} within {self.timeout:g} s"

    def _raise_failure(self) -> None:
        if self.store.check([key := f"{self.series} failed"]):
            rank, _, text = self.store.get(key).decode().partition(" ")
            raise _error(int(rank), text)

    def _say(self, key: str, word: bytes) -> None:
        self.said.append((self.series, key))
        self.store.set(key, word)


def as_instep(error: Exception) -> InstepError:
    """Returns the error itself, or one of ours that says the same."""
    return error if isinstance(error, InstepError) else ApplyError(f"{type(error).__name__}: {error}")


def default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def torch_rank() -> int:
    from torch.distributed import get_rank

    return get_rank()


def _text(error: Exception) -> str:
    """Encodes an error as text: what `compare_set` takes."""
    return msgspec.json.encode(fault_of(error, otherwise="ApplyError")).decode()


def _error(rank: int, text: str) -> InstepError:
    return error_of(msgspec.json.decode(text, type=Fault), f"rank {rank}: ")
