"""vLLM's RLHF examples, with their names: change `rlhf_utils` to `instep.dropin.vllm_rlhf`.

    llm = LLM(model=path, worker_extension_cls="instep.dropin.vllm_rlhf.WorkerExtension")
    # in a thread, or on a Ray actor, since all ranks must come at once:
    llm.collective_rpc("init_weight_update_group", args=(host, port, 1, 2))
    group = stateless_init_process_group(host, port, 0, 2, torch.device("cuda:0"))
    for name, p in model.named_parameters():
        # in a thread: llm.collective_rpc("update_weight", args=(name, "bfloat16", p.shape))
        group.broadcast(p, src=0)

Tensors wait in the workers until the engine's last parameter has come; then all are committed at
once.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from instep.dropin.calls import by_all, in_turn
from instep.dropin.colocate import ColocateWorkerExtension
from instep.dropin.colocate_sender import ColocateSender
from instep.dropin.communicator import DEADLINE, Communicator, join
from instep.dropin.extension import RoundsExtension
from instep.dropin.handles import rebuild_ipc
from instep.protocol import WorkerReceipt

__all__ = [
    "ColocateSender",
    "ColocateWorkerExtension",
    "Communicator",
    "FlattenedTensorMetadata",
    "WorkerExtension",
    "rebuild_ipc",
    "stateless_init_process_group",
]


class FlattenedTensorMetadata(TypedDict):
    """Where a tensor lies in the buffer of the colocated example: `offset` in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int


def stateless_init_process_group(
    master_address: str, master_port: int, rank: int, world_size: int, device: torch.device, timeout: float = DEADLINE
) -> Communicator:
    """A group beside torch's global one: NCCL where `device` is a GPU, Gloo where it is the CPU.
    Returns when all ranks have come.

    timeout: seconds, for this and for each later call on the group. Raises `TransportError` when
    they are over, `ConfigError` for a device that is neither a GPU of CUDA nor the CPU.
    """
    return join(master_address, int(master_port), rank, world_size, torch.device(device), timeout)


class WorkerExtension(RoundsExtension):
    """vLLM's worker with the three methods of the examples."""

    instep_cast = True

    @by_all
    def init_weight_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, timeout: float = DEADLINE
    ) -> None:
        """Joins the trainer's group, with rank `rank_offset` + this worker's rank."""

        def enter(rank: int) -> Communicator:
            return join(master_address, int(master_port), rank, world_size, self.device, timeout)  # type: ignore[attr-defined]

        self.instep_join(rank_offset, enter, timeout)

    @in_turn
    def update_weight(self, name: str, dtype_name: str | torch.dtype, shape: Any) -> WorkerReceipt | None:
        """Receives one tensor from rank 0. With the last that the engine needs, the new weights are
        in place."""
        return self.instep_receive(name, dtype_name, shape, last=None)
