"""The workers of one engine as one of them sees them: they answer each other without their
trainer."""

from __future__ import annotations

from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import torch

from instep.engine import CachePolicy
from instep.protocol import Arrival, Method, Reply, Request, decode
from instep.receiver.state import Receiver

CALLS_OF_A_PHASE = 1 << 16
"""Sequence numbers of one phase: more than it makes calls."""


def receiver_of(worker: Any) -> Receiver | None:
    """Returns this worker's receiver; None until instep has called the worker."""
    receiver: Receiver | None = worker.__dict__.get("instep_receiver")
    return receiver


def speaks(worker: Any) -> bool:
    """Whether this worker raises the errors of all. Only the last one does, unless each worker
    has a caller of its own."""
    parallel = worker.vllm_config.parallel_config
    last: bool = worker.rank == parallel.world_size - 1
    return last or parallel.distributed_executor_backend == "external_launcher"


class Peers:
    """All workers as an `Engine`. A call runs in this worker, and returns the replies of all.

    What is said goes through the store that vLLM's process group was built on. No collective: one that is cut short by a deadline leaves
    its group unusable, and vLLM needs it. `timeout` in seconds.
    """

    name = "vllm"

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.rank: int = worker.rank
        self.size: int = worker.vllm_config.parallel_config.world_size
        self.store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self.first = 0
        if self.size > 1:
            self.store = torch.distributed.distributed_c10d._get_default_store()
            self.first = torch.distributed.get_rank() - self.rank  # engines that run in parallel may share one store
        self.timeout = 0.0
        self.phase = 0
        self.posted: list[str] = []
        self.left: list[str] = []  # what this worker posted in phases that some worker may not have ended yet

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        """Runs a call. Raises `TimeoutError` if a worker does not answer, or has not proved its
        bytes in time."""
        receiver = receiver_of(self.worker)
        if method == "ready" and receiver is not None and receiver.prepared is not None:
            wait([receiver.prepared.arrival], self.timeout)
        key = str(decode(payload, Request).seq)
        self._post(key, self.worker.instep_call(method, payload))
        answers = self._gather(key)
        if method == "ready":
            replies = [decode(answer, Reply) for answer in answers]
            late = [reply.rank for reply in replies if reply.fault is None and not decode(reply.body, Arrival).done]
            if late:
                raise TimeoutError(f"rank {_listed(late)} is still proving the bytes")
        return answers

    def next_phase(self) -> int:
        """Begins a phase. Returns the number before that of its first call. Each phase numbers
        its calls anew, so that a worker that left one early is in step in the next."""
        self.phase += 1
        self.left, self.posted = self.left + self.posted, []
        return CALLS_OF_A_PHASE * self.phase

    def tell_end(self, failure: str | None) -> str | None:
        """Tells the others how the phase has ended in this worker. If it ended well here,
        returns what has failed in another, or None."""
        key = f"end-{self.phase}"
        self._post(key, (failure or "").encode(errors="replace"))
        if failure is not None:
            return None
        try:
            ends = self._gather(key)
        except TimeoutError as error:
            return str(error)
        return next((f"rank {rank} failed: {end.decode()}" for rank, end in enumerate(ends) if end), None)

    def _post(self, key: str, value: bytes) -> None:
        address = self._address(key, self.rank)
        self.store.set(address, value)
        self.posted.append(address)

    def _gather(self, key: str) -> list[bytes]:
        """Returns what each worker has posted, in the order of ranks."""
        addresses = [self._address(key, rank) for rank in range(self.size)]
        try:
            self.store.wait(addresses, timedelta(seconds=self.timeout))
        except RuntimeError as error:
            missing = [rank for rank, address in enumerate(addresses) if not self.store.check([address])]
            raise TimeoutError(f"nothing came from rank {_listed(missing)}") from error
        found: list[bytes] = [self.store.get(address) for address in addresses]
        while self.left:  # all workers have come to this phase
            self.store.delete_key(self.left.pop())
        return found

    def _address(self, key: str, rank: int) -> str:
        return f"instep/{self.first + rank}/{key}"

    async def pause(self, caches: CachePolicy) -> None:
        """Does nothing: no engine step runs during a phase. The caller clears caches, with
        `pause_generation(clear_cache=True)` or `reset_prefix_cache()`."""

    async def resume(self) -> None:
        pass

    async def label(self, version: str) -> None:
        """Does nothing: the caller sets the label with `finish_weight_update(weight_version)`."""

    async def score(self, token_ids: list[int]) -> list[float]:
        raise NotImplementedError

    async def refuse(self, reason: str | None) -> None:
        receiver = receiver_of(self.worker)
        if reason is not None and receiver is not None:
            receiver.condemn(reason)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
