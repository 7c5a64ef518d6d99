"""OpenRLHF: its trainer broadcasts as before, and each update is committed as a whole. One variable
in the environment of its Ray processes:

    INSTEP_ATTACH=1

OpenRLHF hard-codes the name of its worker extension, and the variable puts this one in its place.
OpenRLHF itself loads each tensor into the running model.
"""

from __future__ import annotations

from typing import Any

import torch

from instep.dropin.calls import by_all
from instep.dropin.communicator import dtype_of
from instep.dropin.extension import rounds_of
from instep.dropin.handles import Handles
from instep.dropin.staged import StagedExtension
from instep.errors import ConfigError, PlanError
from instep.protocol import WorkerReceipt


class WorkerWrap(StagedExtension):
    """vLLM's worker with OpenRLHF's methods."""

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
    ) -> None:
        """Joins the trainer's group by OpenRLHF's own function. An update that an earlier trainer
        left is forgotten.

        Raises `ConfigError` for a group of Ray's.
        """
        from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap as Stock

        if use_ray:
            raise ConfigError("instep takes no broadcast of ray.util.collective", next_step="train without vllm.sync_with_ray")
        rounds_of(self).leave()
        Stock.init_process_group(self, master_address, master_port, rank_offset, world_size, group_name, backend, use_ray)

    @by_all
    def update_weight(self, name: str, dtype: str | torch.dtype, shape: Any, empty_cache: bool = False) -> WorkerReceipt | None:
        """Receives one tensor from rank 0, also where its update is refused already: the trainer
        waits for all ranks.

        empty_cache: whether it is the last tensor of the update.
        """
        return rounds_of(self).add(name, lambda: _broadcast(self, dtype_of(dtype), tuple(shape)), last=empty_cache)

    @by_all
    def update_weight_cuda_ipc(
        self, name: str, dtype: str | torch.dtype, shape: Any, ipc_handles: Handles = None, empty_cache: bool = False
    ) -> WorkerReceipt | None:
        """Copies one tensor from the trainer's memory on this GPU.

        ipc_handles: by the UUID of a GPU, what PyTorch's `reduce_tensor` made of the tensor there.
        empty_cache: whether it is the last tensor of the update.
        """
        return self.instep_copy(name, dtype, shape, ipc_handles, last=empty_cache)


def _broadcast(worker: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    group = vars(worker).get("_model_update_group")
    if group is None:
        raise PlanError("this worker is in no group: no trainer can broadcast to it", next_step="call init_process_group first")
    room = torch.empty(shape, dtype=dtype, device=worker.device)
    group.broadcast(room, src=0, stream=torch.cuda.current_stream() if room.is_cuda else None)
    return room
