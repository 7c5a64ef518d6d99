"""A trainer of two ranks under FSDP2 for the GPU tests: this process and one that it starts, with two models each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpus import on_host
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from instep import WeightSync
from instep.bench.fsdp2 import Fsdp2Trainer, Rank, negate
from instep.config import TransportName
from instep.receipt import Receipt

ROWS = {"even": (512, 1024), "uneven": (1001, 1024), "columns": (300, 1024), "one-row": (1, 64), "cuts-a-word": (5, 3), "odd-vector": (9,)}
"""Shapes in bfloat16. Rows of `columns` are halved, of the others the first dimension is."""
TIMEOUT = 60.0


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in ROWS.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False))


def rows(device: str) -> Any:
    torch.manual_seed(3)
    model = Rows().to(device)
    columns = dict(model.named_parameters())["columns"]
    mesh = init_device_mesh(torch.device(device).type, (2,))
    return fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(1) if param is columns else None)


def local(model: Any, name: str) -> torch.Tensor:
    """This rank's part of a parameter."""
    shard: torch.Tensor = dict(model.named_parameters())[name]._local_tensor
    return shard


class RowsRank(Rank):
    """models: the one of the benchmark, and `rows`."""

    def __init__(self, *arguments: Any) -> None:
        on_host("rank 1")
        super().__init__(*arguments)

    def make_rows(self) -> None:
        self.models = {"model": self.model, "rows": rows(self.device)}

    def open_one(self, which: str, transport: TransportName) -> None:
        self.sync = WeightSync(self.models[which], [], transport=transport, timeout=TIMEOUT)

    def negate_rows(self) -> None:
        negate(self.models["rows"])
        self._settle()

    def gather_rows(self) -> None:
        for param in self.models["rows"].parameters():
            param.full_tensor()
        self._settle()

    def poison(self, name: str) -> None:
        here = local(self.model, name)
        self.before = (here, here.clone())
        here.view(-1)[-1] = float("nan")
        self._settle()

    def heal(self) -> None:
        here, before = self.before
        here.copy_(before)
        self._settle()


class Ranks(Fsdp2Trainer):
    rank = RowsRank

    def __init__(self, devices: tuple[str, str]) -> None:
        super().__init__("tiny", devices)
        with self.peer.doing("make_rows"):
            self.models = {"model": self.sharded, "rows": rows(devices[0])}

    @contextmanager
    def opened(self, which: str, engine: Any, transport: TransportName) -> Iterator[WeightSync]:
        """A `WeightSync` of this rank's, with one of the other's beside it."""
        with self.peer.doing("open_one", which, transport):
            sync = WeightSync(self.models[which], [engine], transport=transport, timeout=TIMEOUT)
        try:
            yield sync
        finally:
            with self.peer.doing("close"):
                sync.close()

    def push(self, sync: WeightSync, version: str) -> Receipt:
        with self.peer.doing("push", version):
            return sync.push(version)

    def negate_rows(self) -> None:
        with self.peer.doing("negate_rows"):
            negate(self.models["rows"])

    def gathered_rows(self) -> dict[str, torch.Tensor]:
        with self.peer.doing("gather_rows"):
            return {name: param.full_tensor() for name, param in self.models["rows"].named_parameters()}
