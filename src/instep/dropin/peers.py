"""The workers of one engine among themselves: each says what it knows, and all go the same way.

They meet in the store on which torch joined them when the engine started. Nobody waits longer than a deadline, and who gives up says so
first: then those who come later do not go on alone.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from instep.errors import InstepError, TransportError, by_name
from instep.protocol import Fault, decode, encode


class _Word(msgspec.Struct, frozen=True):
    body: bytes = b""
    fault: Fault | None = None


class Peers:
    """Worker `rank` of `size`. `store` may be None where there is one worker."""

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.store = store
        self.said: list[str] = []

    def exchange(self, topic: str, mine: bytes) -> list[bytes]:
        """What every worker says about a topic, in rank order.

        Raises the fault of a worker that has failed, and `TransportError` naming those who are silent until the deadline.
        """
        if self.size == 1:
            return [mine]
        self._say(topic, _Word(mine))
        end = time.monotonic() + self.timeout
        while silent := [rank for rank in range(self.size) if not self.store.check([f"{topic} {rank}"])]:
            self._raise_faults(topic)
            if time.monotonic() > end:
                raise TransportError(f"workers {silent} of the engine did not come to an agreement ({topic}) within {self.timeout:g} s")
            time.sleep(0.002)
        self._raise_faults(topic)
        words = [decode(self.store.get(f"{topic} {rank}"), _Word) for rank in range(self.size)]
        for rank, word in enumerate(words):
            _raise(rank, word.fault)
        return [word.body for word in words]

    def tell(self, topic: str, error: InstepError) -> None:
        """This worker has nothing else to say about a topic. About `NUMBER failed`: the others shall not commit this round."""
        if self.size > 1:
            self._say(topic, _Word(fault=_fault(error)))

    def end(self, call: int, error: InstepError | None) -> InstepError | None:
        """Tells how a call of all workers ended in this one. The first error of all, in the order of their ranks.

        An error of another worker begins with its rank. One that is silent until the deadline is an error too. Calls are numbered alike in
        all workers.
        """
        if self.size == 1:
            return error
        self.store.set(f"call {call} {self.rank}", encode(_Word(fault=None if error is None else _fault(error))))
        self.store.delete_key(f"call {call - 2} {self.rank}")  # nobody looks for it any more: all have ended the call after it
        limit = time.monotonic() + self.timeout
        others = (error if rank == self.rank else self._ended(f"call {call} {rank}", rank, limit) for rank in range(self.size))
        return next((one for one in others if one is not None), None)

    def _ended(self, key: str, rank: int, limit: float) -> InstepError | None:
        while not self.store.check([key]):
            if time.monotonic() > limit:
                return TransportError(f"worker {rank} of the engine did not end this call within {self.timeout:g} s")
            time.sleep(0.0005)
        fault = decode(self.store.get(key), _Word).fault
        return None if fault is None else _error(rank, fault)

    def forget(self, number: int) -> None:
        """What was said before the round ahead of this one: nobody asks for it any more."""
        for key in [key for key in self.said if int(key.split()[0]) < number - 1]:
            self.said.remove(key)
            self.store.delete_key(key)

    def _say(self, topic: str, word: _Word) -> None:
        self.said.append(f"{topic} {self.rank}")
        self.store.set(self.said[-1], encode(word))

    def _raise_faults(self, topic: str) -> None:
        for rank in range(self.size):
            key = f"{topic.split()[0]} failed {rank}"
            if rank != self.rank and self.store.check([key]):
                _raise(rank, decode(self.store.get(key), _Word).fault)


def _raise(rank: int, fault: Fault | None) -> None:
    if fault is not None:
        raise _error(rank, fault)


def _fault(error: InstepError) -> Fault:
    return Fault(type(error).__name__, str(error.args[0]), error.tensor, vars(error).get("next_step"))


def _error(rank: int, fault: Fault) -> InstepError:
    return by_name(fault.kind)(f"worker {rank}: {fault.message}", tensor=fault.tensor, next_step=fault.next_step)


def of_worker(worker: Any, timeout: float) -> Peers:
    """The peers of a vLLM worker within its own engine."""
    parallel = worker.vllm_config.parallel_config
    if parallel.world_size == 1:
        return Peers(0, 1, None, timeout)
    from torch.distributed.distributed_c10d import _get_default_store

    engine = getattr(parallel, "data_parallel_index", 0)
    return Peers(worker.rank, parallel.world_size, PrefixStore(f"instep {engine}", _get_default_store()), timeout)
