"""`VLLMWeightSyncScheme`: what sender and receivers have to agree on.

Two layers. Control: an `Rpc` (`instep.engine.remote.rpc`) reaches each receiver, over TCP unless
another is given. Data: a `WeightSync.push`, from whose transport the engines' workers read.
"""

from __future__ import annotations

import socket
from typing import Any

import torch

from instep.dropin.torchrl.reach import engine_of, resolve
from instep.dropin.torchrl.receiver import VLLMWeightReceiver
from instep.dropin.torchrl.scheme import Scheme, Strategy
from instep.dropin.torchrl.sender import VLLMWeightSender
from instep.dropin.torchrl.token import default_token
from instep.dropin.torchrl.weights import Metadata, get_model_metadata
from instep.engine.remote.tcp import TcpDoor
from instep.errors import ConfigError

Device = torch.device | str | int


class VLLMWeightSyncScheme(Scheme):
    """Give both sides the same `master_port`, or make the scheme once and send it to both.

    master_address, master_port: where the trainer listens for receivers; on the loopback, at a free
        port, by default.
    gpus_per_replica: how many workers each engine has (tensor × pipeline × data parallel). It is
        compared with what the engines say; with None it is not, and engines may differ.
    num_replicas: how many engines there are.
    device: a GPU of the trainer, by its index or name; it must be there where there are GPUs. The
        weights go out from wherever they are.
    token: what a receiver must know to be let in. By default the environment's INSTEP_TOKEN or,
        without one, a token that this user's processes on this machine share.
    timeout: seconds that each phase may take on each engine, and that each side waits for the
        other.
    settings: the others of `instep.WeightSync`.

    Raises `ConfigError` for values that cannot be meant.
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int | None = 1,
        num_replicas: int = 1,
        strategy: Strategy = "tensordict",
        device: Device = 0,
        *,
        token: str | None = None,
        timeout: float = 60.0,
        **settings: Any,
    ) -> None:
        super().__init__(strategy, {"timeout": timeout, **settings})
        for name, count in (("gpus_per_replica", 1 if gpus_per_replica is None else gpus_per_replica), ("num_replicas", num_replicas)):
            if count < 1:
                raise ConfigError(f"{name} must be 1 or more, not {count}")
        self.master_address = master_address or "localhost"
        self.master_port = free_port() if master_port is None else int(master_port)
        self.gpus_per_replica, self.num_replicas, self.device = gpus_per_replica, num_replicas, device
        self.token = token or default_token()
        self.timeout = timeout
        gpu_index(device)

    @property
    def world_size(self) -> int:
        """The trainer and all workers of the engines, as far as `gpus_per_replica` says."""
        return 1 + self.num_replicas * (self.gpus_per_replica or 1)

    def check_device(self) -> None:
        """Raises `ConfigError` on a trainer with GPUs that has not the scheme's `device`."""
        index = gpu_index(self.device)
        if torch.cuda.is_available() and index is not None and index >= torch.cuda.device_count():
            raise ConfigError(f"device={self.device!r}: there are {torch.cuda.device_count()} GPUs here")

    def create_door(self, name: str | None = None) -> TcpDoor:
        """A receiver's way to the trainer."""
        return TcpDoor(self.master_address, self.master_port, self.token, name)

    def create_transport(self, **unknown: Any) -> VLLMCollectiveTransport:
        """The trainer's side without engines, as a transport. The original takes any keyword and
        drops it; here it is refused."""
        if unknown:
            raise ConfigError(f"create_transport takes no arguments, not {', '.join(unknown)}")
        return VLLMCollectiveTransport(
            self.master_address, self.master_port, 0, self.world_size, self.device, token=self.token, **self.settings
        )

    def create_sender(self) -> VLLMWeightSender:
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any = None) -> VLLMWeightReceiver:
        return VLLMWeightReceiver(self, vllm_engine)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """What a collector calls. If the sender has joined no engine yet, it joins that of the
        collector's policy."""
        if not self.sender.joined:
            model = self.sender.model if weights is None else weights
            if model is None or self.context is None:
                raise ConfigError("there are no weights to send", next_step="give the collector a module, or scheme.sender.register_model")
            policy = resolve(self.context, self.model_id or "policy")
            self.sender.init_all_workers_group(get_model_metadata(model), engine_of(policy))
        super().send(weights, worker_ids)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def gpu_index(device: Device) -> int | None:
    """The GPU that a `device` names; None for the CPU. Raises `ConfigError` for what is no
    device."""
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be a GPU's index or a device of torch, not {device!r}") from error
    return found.index or 0 if found.type == "cuda" else None


class VLLMCollectiveTransport:
    """One side of a scheme.

    master_address, master_port: where the trainer listens.
    rank: 0 for the trainer; anything else is the engine's side, whose engine knows its ranks
        itself.
    world_size: 1 + engines × workers of each.
    device, settings: as for `VLLMWeightSyncScheme`, which has `token` and `timeout` too. None: GPU
        0.
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
        """As `VLLMWeightSender.update_weights`. model_id: there is one model in an engine, under
        whatever name."""
        if not isinstance(self._side, VLLMWeightSender):
            raise ConfigError("rank 0 sends, once its init_all_workers_group has returned")
        self._side.update_weights(weights)

    def receive_weights(self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None) -> None:
        """Nothing: weights come to the engine by themselves, as with the original. Arguments are
        refused."""
        if any(given is not None for given in (timeout, weights, model, strategy)):
            raise ConfigError("weights come to the engine by themselves: receive_weights takes no arguments")

    def check_connection(self) -> bool:
        """Whether `init_all_workers_group` has returned."""
        return self._side is not None

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.shutdown()
            self._side = None
