"""The group of `use_ray=True`: one that Ray's collective functions know by its name, on both sides.

Ray's own Gloo group is torch's global group. A vLLM worker has one already, of its engine alone,
and a trainer has its own: neither can take part. So a backend is registered with Ray, by the
interface that Ray has for it, whose groups are `Communicator`s.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from instep.dropin.communicator import Communicator, join
from instep.errors import ConfigError
from instep.extras import needed_by

BACKEND = "INSTEP"
WANTED: dict[str, tuple[Any, ...]] = {}
"""Where a group meets, by its name: Ray does not hand that on to a backend."""


def join_with_ray(host: str, port: int, rank: int, world_size: int, device: torch.device, timeout: float, name: str) -> Communicator:
    """As `communicator.join`; afterwards `ray.util.collective` reaches the group by its name too.

    Raises `ConfigError` outside of Ray's actors and tasks.
    """
    with needed_by("use_ray=True"):
        import ray
        from ray.util import collective
    if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        raise ConfigError(
            "use_ray=True works between Ray actors or tasks, and this process is neither",
            next_step="vLLM's workers are in an actor with the executors 'ray' and, for one worker with "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0, 'uni'; elsewhere leave use_ray out",
        )
    _register()
    if collective.is_group_initialized(name):
        collective.destroy_collective_group(name)
    WANTED[name] = host, port, device, timeout
    collective.init_collective_group(world_size, rank, BACKEND, name)
    found: Communicator = collective.get_group_handle(name).communicator
    return found


@lru_cache(maxsize=1)
def _register() -> None:
    from ray.util.collective.backend_registry import register_collective_backend
    from ray.util.collective.collective_group.base_collective_group import BaseGroup
    from torch.distributed import ReduceOp

    class RayGroup(BaseGroup):  # type: ignore[misc]
        def __init__(self, world_size: int, rank: int, group_name: str) -> None:
            super().__init__(world_size, rank, group_name)
            host, port, device, timeout = WANTED.pop(group_name)
            self.communicator = join(host, port, rank, world_size, device, timeout, group_name)

        @classmethod
        def backend(cls) -> str:
            return BACKEND

        @classmethod
        def check_backend_availability(cls) -> bool:
            return True

        def destroy_group(self) -> None:
            self.communicator.close()

        def broadcast(self, tensor: list[torch.Tensor], broadcast_options: Any = None) -> None:
            self.communicator.broadcast(tensor[0], broadcast_options.root_rank)

        def allreduce(self, tensor: list[torch.Tensor], allreduce_options: Any = None) -> None:
            tensor[0].copy_(self.communicator.all_reduce(tensor[0], op=getattr(ReduceOp, allreduce_options.reduceOp.name)))

        def send(self, tensor: list[torch.Tensor], send_options: Any) -> None:
            self.communicator.send(tensor[0], send_options.dst_rank)

        def recv(self, tensor: list[torch.Tensor], recv_options: Any) -> None:
            self.communicator.recv(tensor[0], recv_options.src_rank)

        def barrier(self, barrier_options: Any = None) -> None:  # noqa: ARG002
            self.communicator.all_reduce(torch.zeros(1, device=self.communicator.device))

        def reduce(self, *_: Any) -> None:
            raise NotImplementedError("this group has broadcast, allreduce, send, recv and barrier")

        allgather = reducescatter = reduce

    register_collective_backend(BACKEND, RayGroup)
