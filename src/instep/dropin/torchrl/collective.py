"""`VLLMWeightSyncScheme`: what sender and receivers have to agree on.

Two layers. Control: an `Rpc` (`instep.engine.rpc`) reaches each receiver, over TCP unless another is given. Data: a `WeightSync.push`, from
whose transport the engines' workers read.
"""

from __future__ import annotations

import os
import secrets
import socket
from operator import attrgetter
from typing import Any

from instep.dropin.torchrl.receiver import VLLMWeightReceiver
from instep.dropin.torchrl.scheme import Scheme, Strategy
from instep.dropin.torchrl.sender import VLLMWeightSender
from instep.dropin.torchrl.weights import get_model_metadata
from instep.engine.tcp import TcpDoor
from instep.errors import ConfigError


class VLLMWeightSyncScheme(Scheme):
    """Make it once and send it to both sides, or give both the same `master_port` and `token`.

    master_address, master_port: where the trainer listens for receivers; on the loopback, at a free port, by default.
    num_replicas: how many engines there are. gpus_per_replica, device: not needed, engines say what they run on.
    token: what a receiver must know to be let in; the environment's INSTEP_TOKEN by default, or a random one.
    timeout: seconds that each phase may take on each engine, and that each side waits for the other.
    settings: the others of `instep.WeightSync`.
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: Strategy = "tensordict",
        device: Any = 0,
        *,
        token: str | None = None,
        timeout: float = 60.0,
        **settings: Any,
    ) -> None:
        super().__init__(strategy, {"timeout": timeout, **settings})
        self.master_address = master_address or "localhost"
        self.master_port = master_port or free_port()
        self.gpus_per_replica, self.num_replicas, self.device = gpus_per_replica, num_replicas, device
        self.token = token or os.environ.get("INSTEP_TOKEN") or secrets.token_hex(32)
        self.timeout = timeout

    def create_transport(self, **_: Any) -> TcpDoor:
        """A receiver's way to the trainer."""
        return TcpDoor(self.master_address, self.master_port, self.token)

    def create_sender(self) -> VLLMWeightSender:
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any = None) -> VLLMWeightReceiver:
        return VLLMWeightReceiver(self, vllm_engine)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """What a collector calls. If the sender has joined no engine yet, it joins that of the collector's policy."""
        if not self.sender.joined:
            model = self.sender.model if weights is None else weights
            if model is None or self.context is None:
                raise ConfigError("there are no weights to send", next_step="give the collector a module, or scheme.sender.register_model")
            policy = attrgetter(self.model_id or "policy")(self.context)
            self.sender.init_all_workers_group(get_model_metadata(model), getattr(policy, "model", policy))
        super().send(weights, worker_ids)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
