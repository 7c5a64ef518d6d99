"""`VLLMWeightSyncScheme`: what sender and receivers have to agree on.

Two layers. Control: an `Rpc` (`instep.engine.rpc`) reaches each receiver, over TCP unless another is given. Data: a `WeightSync.push`, from
whose transport the engines' workers read.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import torch

from instep.dropin.torchrl.reach import engine_of, resolve
from instep.dropin.torchrl.receiver import VLLMWeightReceiver
from instep.dropin.torchrl.scheme import Scheme, Strategy
from instep.dropin.torchrl.sender import VLLMWeightSender
from instep.dropin.torchrl.token import default_token
from instep.dropin.torchrl.weights import get_model_metadata
from instep.engine.tcp import TcpDoor
from instep.errors import ConfigError

if TYPE_CHECKING:
    from instep.dropin.torchrl.transport import VLLMCollectiveTransport

Device = torch.device | str | int


class VLLMWeightSyncScheme(Scheme):
    """Give both sides the same `master_port`, or make the scheme once and send it to both.

    master_address, master_port: where the trainer listens for receivers; on the loopback, at a free port, by default.
    gpus_per_replica: how many workers each engine has (tensor × pipeline × data parallel). It is
        compared with what the engines say; with None it is not, and engines may differ.
    num_replicas: how many engines there are.
    device: a GPU of the trainer, by its index or name; it must be there where there are GPUs. The
        weights go out from wherever they are.
    token: what a receiver must know to be let in. By default the environment's INSTEP_TOKEN or, without one, a token that this user's
        processes on this machine share.
    timeout: seconds that each phase may take on each engine, and that each side waits for the other.
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
        """The trainer's side without engines, as a transport. The original takes any keyword and drops it; here it is refused."""
        from instep.dropin.torchrl.transport import VLLMCollectiveTransport

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
        """What a collector calls. If the sender has joined no engine yet, it joins that of the collector's policy."""
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
    """The GPU that a `device` names; None for the CPU. Raises `ConfigError` for what is no device."""
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be a GPU's index or a device of torch, not {device!r}") from error
    return found.index or 0 if found.type == "cuda" else None
