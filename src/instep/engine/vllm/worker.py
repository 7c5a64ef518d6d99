"""The half of the vLLM engine that runs inside vLLM's workers.

    LLM(model=..., worker_extension_cls="instep.vllm.WorkerExtension")

vLLM mixes the class into its worker; `collective_rpc("instep_call", ...)` then reaches a `Receiver`
in every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from instep.engine.vllm.changes import watch
from instep.engine.vllm.host import VllmModel
from instep.engine.vllm.initial import VllmFresh
from instep.forked import is_child
from instep.protocol import Identity, Reply, Request, decode, encode
from instep.receiver import Fresh
from instep.receiver.state import Receiver


class WorkerExtension:
    """instep's half inside a vLLM worker, named by `worker_extension_cls` when the engine starts.

    `self` is vLLM's worker.
    """

    def instep_call(self, method: str, payload: bytes) -> bytes:
        """Answers one call of the receiver's protocol: an encoded `Request` in, an encoded
        `Reply` out. Never raises."""
        return receiver_for(self).handle(method, payload)

    def instep_status(self) -> dict[str, Any]:
        """Returns what this worker serves and its last error, in plain JSON types: for people,
        and for vLLM's route `/collective_rpc`."""
        reply = decode(self.instep_call("status", encode(Request(0, ""))), Reply)
        identity = decode(reply.body, Identity)
        return {
            "rank": reply.rank,
            "state": reply.state,
            "version": reply.version,
            "prepared": identity.prepared,
            "last_error": identity.last_error,
        }


def receiver_for(worker: Any) -> Receiver:
    """Returns the receiver of a vLLM worker, and makes it on the first call."""
    if "instep_receiver" not in vars(worker):
        adopt(worker, VllmHost(worker), Receiver)
    receiver: Receiver = vars(worker)["instep_receiver"]
    return receiver


def adopt(worker: Any, host: VllmHost, kind: type[Receiver]) -> None:
    """Makes the receiver of a vLLM worker, which also notices other changes of the weights."""
    if host.device != "cpu" and is_child():
        # OpenMP's threads are not forked, and PyTorch would wait for them in host memory. On a GPU
        # vLLM forks its engine.
        torch.set_num_threads(1)
    vars(worker)["instep_receiver"] = receiver = kind(host)
    watch(worker, receiver, lambda: host.busy)


class VllmHost(VllmModel):
    """A worker's model that can make a second one."""

    def fresh(self, fill: int) -> Fresh:
        return VllmFresh(self, fill)
