"""A communicator that the functions of `torch.distributed` take as their `group`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d

from instep.dropin.communicator import Communicator


class TorchGroup(Communicator):
    """For `torch.distributed.broadcast(tensor, src, group=...)`, with ranks of this group. Its own
    methods stay as they are."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator.group, communicator.timeout, communicator.lines)
        distributed_c10d._world.pg_group_ranks[self] = {rank: rank for rank in range(self.world_size)}  # type: ignore[index]

    def broadcast(self, tensor: Any, src: Any = 0, stream: Any = None) -> Any:
        """As `Communicator.broadcast`; or as `torch.distributed` calls a group: a list of one
        tensor, and options that name the source."""
        if isinstance(tensor, torch.Tensor):
            return super().broadcast(tensor, src, stream)
        (only,) = tensor
        super().broadcast(only, src.rootRank)
        return Done()

    def close(self) -> None:
        distributed_c10d._world.pg_group_ranks.pop(self, None)  # type: ignore[call-overload]
        super().close()


class Done:
    """Work that had ended when it was returned."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True
