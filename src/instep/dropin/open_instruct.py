"""Open Instruct's weight sync, with its names: in the place of `vllm_utils_workerwrap.py` and of
the functions of `vllm_utils.py`.

    engines = create_vllm_engines(..., worker_extension_cls="instep.dropin.open_instruct.WorkerWrap")
    refs = [engine.init_process_group.remote(host, port, rank_offset, world_size, "openrlhf", "nccl") for ...]
    group = init_process_group("nccl", f"tcp://{host}:{port}", world_size=world_size, rank=0, group_name="openrlhf")
    broadcast_weights_to_vllm(model, engines, group, deepspeed_stage)

Tensors wait in the workers, and the last one commits them all: `empty_cache=True`,
`finish_update()`, or what is seen to be the last.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from instep.dropin.answers import GRACE, call, meanwhile, settle
from instep.dropin.calls import by_all, in_turn
from instep.dropin.communicator import DEADLINE, Communicator, join
from instep.dropin.extension import RoundsExtension
from instep.dropin.handles import Handles, device_id, share
from instep.dropin.ray_group import join_with_ray
from instep.dropin.torch_group import TorchGroup
from instep.dropin.zero import tell_all_ranks, weights
from instep.errors import ConfigError, TransportError
from instep.protocol import WorkerReceipt, dtype_name

__all__ = ["Communicator", "WorkerWrap", "broadcast_weights_to_vllm", "init_process_group", "share"]

logger = logging.getLogger("instep")


class WorkerWrap(RoundsExtension):
    """vLLM's worker with Open Instruct's methods."""

    @by_all
    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
        use_ray: bool = False,
        timeout_minutes: float = 120,
    ) -> None:
        """Joins the trainer's group, with rank `rank_offset` + this worker's rank.

        timeout_minutes: for the group to form, and for each broadcast that follows.
        """
        method = f"tcp://{master_address}:{master_port}"

        def enter(rank: int) -> Communicator:
            return _join(backend, method, timeout_minutes * 60, world_size, rank, group_name, use_ray, self.device)  # type: ignore[attr-defined]

        self.instep_join(rank_offset, enter, timeout_minutes * 60)

    @in_turn
    def update_weight(self, name: str, dtype: str | torch.dtype, shape: Any, empty_cache: bool | None = None) -> WorkerReceipt | None:
        """Receives one tensor from rank 0. empty_cache: whether it is the last one; left out, the
        end of an update is seen here."""
        return self.instep_receive(name, dtype, shape, last=empty_cache)

    @by_all
    def update_weight_cuda_ipc(
        self, name: str, dtype: str | torch.dtype, shape: Any, ipc_handles: Handles = None, empty_cache: bool | None = None
    ) -> WorkerReceipt | None:
        """Copies one tensor from the trainer's memory on this GPU; the trainer may change it when
        this has returned.

        ipc_handles: by the UUID of a GPU, what `share` or PyTorch's `reduce_tensor` made of the
        tensor there; or a list: of such mappings, of pairs (UUID, handle), or of one handle for
        each worker in the order of their ranks. empty_cache: see `update_weight`.
        """
        return self.instep_copy(name, dtype, shape, ipc_handles, last=empty_cache)

    def report_device_id(self) -> str:
        """The key of `ipc_handles` that is meant for this worker."""
        return device_id(self.device)  # type: ignore[attr-defined]


def init_process_group(
    backend: str = "nccl",
    init_method: str = "",
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    group_name: str = "",
    use_ray: bool = False,
) -> Communicator:
    """The trainer's place in the group, beside torch's global one. Returns when all ranks have
    come.

    init_method: `tcp://HOST:PORT`; rank 0 listens there. timeout: for the group and for each later
    call, 5 minutes unless given. Raises `ConfigError` for arguments that make no group,
    `TransportError` when the time is over.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    seconds = timeout.total_seconds() if timeout else DEADLINE
    return _join(backend, init_method, seconds, world_size, rank, group_name, use_ray, device)


def _join(
    backend: str, init_method: str, seconds: float, world_size: int, rank: int, group_name: str, use_ray: bool, device: torch.device
) -> Communicator:
    host, _, port = init_method.removeprefix("tcp://").rpartition(":")
    if not init_method.startswith("tcp://") or not host or not port.isdecimal():
        raise ConfigError(f"{init_method!r} is no address of a group: give tcp://HOST:PORT")
    if not group_name or not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size} in a group named {group_name!r}: all three are needed, with 0 <= rank < world_size")
    if backend not in ("nccl", "gloo"):
        raise ConfigError(f"backend {backend!r} is neither nccl nor gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(f"NCCL needs a GPU, and rank {rank} is on {device}", next_step="give every rank backend='gloo'")
    device = device if backend == "nccl" else torch.device("cpu")
    if use_ray:
        return join_with_ray(host.strip("[]"), int(port), rank, world_size, device, seconds, group_name)
    return TorchGroup(join(host.strip("[]"), int(port), rank, world_size, device, seconds, group_name))


def broadcast_weights_to_vllm(
    model: torch.nn.Module,
    vllm_engines: Sequence[Any],
    model_update_group: Communicator | None,
    deepspeed_stage: int,
    gather_whole_model: bool = True,
    timeout: float = DEADLINE,
) -> list[Any]:
    """Sends the model's weights from rank 0 to every engine, and returns when all of them serve
    these weights. Nothing is left to wait for.

    To be called by every rank of the trainer with ZeRO 3; other stages need rank 0 alone, and
    return at once elsewhere.
    gather_whole_model: ZeRO 3 gathers all parameters at once, instead of one after the other.
    timeout: seconds for each tensor.

    Raises `SyncError` or a subclass on every rank that took part: on rank 0 `.engines` says what is
    known of each engine. Before the last tensor all of them serve what they served.
    """
    ranked = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if ranked else 0
    if rank and deepspeed_stage < 3:
        return []
    sender = _Sender(vllm_engines, model_update_group, timeout)
    try:
        for name, value, last in weights(model, deepspeed_stage, gather_whole_model, sending=rank == 0):
            sender.send(name, value, last)
    except Exception as error:
        sender.error = sender.error or error
    if deepspeed_stage == 3 and ranked:
        tell_all_ranks(sender.error)
    if sender.error is not None:
        raise sender.error
    return []


class _Sender:
    """Rank 0's part. It keeps its first error and goes on taking part in what the trainer's ranks
    do together."""

    def __init__(self, engines: Sequence[Any], group: Communicator | None, timeout: float) -> None:
        self.engines, self.group, self.timeout = engines, group, timeout
        self.error: Exception | None = None

    def send(self, name: str, value: torch.Tensor, last: bool) -> None:
        try:
            if self.error is None:
                self._send(name, value, last)
        except Exception as error:
            self.error = error

    def _send(self, name: str, value: torch.Tensor, last: bool) -> None:
        if self.group is None:
            raise ConfigError("rank 0 has no group to broadcast to", next_step="give it what init_process_group returned")
        self.group.timeout = self.timeout
        announced = {"name": name, "dtype": dtype_name(value.dtype), "shape": list(value.shape), "empty_cache": last}
        calls = [call(engine, "update_weight", **announced) for engine in self.engines]
        broken = None
        try:
            meanwhile(self.group, partial(self.group.broadcast, value), calls)
        except TransportError as error:
            broken = error  # an engine that has ended it says why
        settle(calls, f"update_weight of {name}", GRACE if broken else self.timeout)
        if broken is not None:
            raise broken
        if last:
            self._reset_caches()

    def _reset_caches(self) -> None:
        resets = [call(engine, "reset_prefix_cache") for engine in self.engines if hasattr(engine, "reset_prefix_cache")]
        done = [reset.result(self.timeout) for reset in resets]
        if False in done:
            logger.warning("an engine keeps its prefix cache, which is of the old weights: requests are in flight")


def __getattr__(name: str) -> Any:
    """Engines, their prompts and their results: imported when they are asked for, as workers do
    without Ray."""
    if not name.startswith("_"):
        from instep.dropin import open_instruct_engines

        if name in open_instruct_engines.__all__:
            return getattr(open_instruct_engines, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
