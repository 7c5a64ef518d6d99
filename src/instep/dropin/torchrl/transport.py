"""`VLLMCollectiveTransport`: the sender's and the receiver's calls under one name, as TorchRL has them."""

from __future__ import annotations

from typing import Any

from instep.dropin.torchrl.collective import Device, VLLMWeightSyncScheme
from instep.dropin.torchrl.receiver import VLLMWeightReceiver
from instep.dropin.torchrl.sender import VLLMWeightSender
from instep.dropin.torchrl.weights import Metadata
from instep.errors import ConfigError


class VLLMCollectiveTransport:
    """One side of a scheme.

    master_address, master_port: where the trainer listens.
    rank: 0 for the trainer; anything else is the engine's side, whose engine knows its ranks itself.
    world_size: 1 + engines × workers of each.
    device, settings: as for `VLLMWeightSyncScheme`, which has `token` and `timeout` too. None: GPU 0.
    vllm_engine: the engine or engines; the trainer's side can do without, where receivers dial it.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        rank: int | None,
        world_size: int,
        device: Device | None = None,
        vllm_engine: Any = None,
        **settings: Any,
    ) -> None:
        self.master_address, self.master_port = master_address, master_port
        self.rank, self.world_size, self.vllm_engine = rank, world_size, vllm_engine
        self.device = 0 if device is None else device
        self._settings = settings
        self._side: VLLMWeightSender | VLLMWeightReceiver | None = None
        if world_size < 2:
            raise ConfigError(f"world_size counts the trainer and each worker of each engine: 2 or more, not {world_size}")

    def init_all_workers_group(self, model_metadata: Metadata, gpus_per_replica: int | None = None) -> None:
        """Joins the other side, as the sender's or the receiver's method of this name does.

        gpus_per_replica: by default what `world_size` leaves to each of the engine's replicas.
        """
        self.shutdown()
        each = gpus_per_replica or max(1, (self.world_size - 1) // getattr(self.vllm_engine, "num_replicas", 1))
        replicas, rest = divmod(self.world_size - 1, each)
        if rest:
            raise ConfigError(f"world_size={self.world_size} is not 1 + engines × {each} workers")
        scheme = VLLMWeightSyncScheme(self.master_address, self.master_port, each, replicas, "state_dict", self.device, **self._settings)
        if self.rank == 0:
            sender = scheme.create_sender()
            sender.init_all_workers_group(model_metadata, self.vllm_engine)
            self._side = sender
        else:
            receiver = scheme.create_receiver(self.vllm_engine)
            receiver.init_all_workers_group(model_metadata)
            self._side = receiver

    def send_weights(self, model_id: str, weights: Any) -> None:  # noqa: ARG002
        """As `VLLMWeightSender.update_weights`. model_id: there is one model in an engine, under whatever name."""
        if not isinstance(self._side, VLLMWeightSender):
            raise ConfigError("rank 0 sends, once its init_all_workers_group has returned")
        self._side.update_weights(weights)

    def receive_weights(self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None) -> None:
        """Nothing: weights come to the engine by themselves, as with the original. Arguments are refused."""
        if any(given is not None for given in (timeout, weights, model, strategy)):
            raise ConfigError("weights come to the engine by themselves: receive_weights takes no arguments")

    def check_connection(self) -> bool:
        """Whether `init_all_workers_group` has returned."""
        return self._side is not None

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.shutdown()
            self._side = None
