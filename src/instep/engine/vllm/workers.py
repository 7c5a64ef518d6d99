"""All workers of one vLLM engine as an `Engine`, in each of them: so each can do what a trainer
does, with the same code."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from instep.engine import CachePolicy
from instep.engine.vllm.peers import Peers, Silent, receiver_of
from instep.errors import EngineLost, InstepError
from instep.protocol import Arrival, Method, Reply, Request, decode


class Workers:
    """A call runs in this worker, and returns the replies of all."""

    name = "vllm"

    def __init__(self, worker: Any, peers: Peers) -> None:
        self.worker, self.peers = worker, peers

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        """Runs a call. Raises `TimeoutError` if a worker does not answer, or has not proved its
        bytes in time; `EngineLost` if one has failed and will not answer."""
        receiver = receiver_of(self.worker)
        if method == "ready" and receiver is not None and receiver.prepared is not None:
            wait([receiver.prepared.arrival], self.peers.timeout)
        try:
            answers = self.peers.exchange(str(decode(payload, Request).seq), self.worker.instep_call(method, payload))
        except Silent as error:
            raise TimeoutError(error.args[0]) from error
        except InstepError as error:
            raise EngineLost(error.args[0], next_step=error.next_step) from error
        if method == "ready":
            replies = [decode(answer, Reply) for answer in answers]
            late = [reply.rank for reply in replies if reply.fault is None and not decode(reply.body, Arrival).done]
            if late:
                raise TimeoutError(f"rank {', '.join(map(str, late))} is still proving the bytes")
        return answers

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
