"""Ray actors for the tests of the drop-ins: an engine as Open Instruct has it, one that dies, and a trainer."""

from __future__ import annotations

import os
from typing import Any

import torch
from engines import Generated, greedy, settings, start
from models import PROMPTS, tiny

GROUP = "openrlhf"


class Engine:
    """vLLM with its only worker in the actor's own process."""

    def __init__(self, folder: str) -> None:
        with settings():
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            self.llm = start(folder, worker_extension_cls="instep.dropin.open_instruct.WorkerWrap")  # type: ignore[arg-type]
        self.die = False

    def init_process_group(self, *args: Any, **kwargs: Any) -> Any:
        return self.llm.collective_rpc("init_process_group", args=args, kwargs=kwargs)

    def update_weight(self, name: str, dtype: str, shape: Any, empty_cache: bool = False) -> Any:
        if self.die:
            os._exit(1)
        return self.llm.collective_rpc("update_weight", args=(name, dtype, shape, empty_cache))

    def reset_prefix_cache(self) -> Any:
        return self.llm.reset_prefix_cache()

    def generate(self) -> Generated:
        return greedy(self.llm, PROMPTS)

    def die_at_the_next_tensor(self) -> None:
        self.die = True


class Trainer:
    def __init__(self, family: str) -> None:
        self.family = family

    def init_process_group(self, port: int, use_ray: bool) -> None:
        from instep.dropin.open_instruct import init_process_group

        self.group = init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=GROUP, use_ray=use_ray)

    def bring(self, seed: int, engines: list[Any]) -> list[Any]:
        from instep.dropin.open_instruct import broadcast_weights_to_vllm

        return broadcast_weights_to_vllm(tiny(self.family, seed), engines, self.group, 0, timeout=30)


class Member:
    """Somebody in a group that Ray knows by its name."""

    def enter(self, port: int, rank: int, backend: str) -> None:
        from instep.dropin.open_instruct import init_process_group

        self.rank = rank
        init_process_group(backend, f"tcp://127.0.0.1:{port}", world_size=2, rank=rank, group_name="pair", use_ray=True)

    def collectives(self) -> list[list[float]]:
        from ray.util import collective

        sent, room = torch.arange(3.0) + self.rank, torch.full((3,), self.rank + 1.0)
        collective.broadcast(sent, src_rank=1, group_name="pair")
        collective.allreduce(room, group_name="pair")
        point = torch.full((3,), 7.0 if self.rank else 0.0)
        collective.send(point, 0, "pair") if self.rank else collective.recv(point, 1, "pair")
        collective.barrier("pair")
        return [sent.tolist(), room.tolist(), point.tolist()]
