"""What the ranks of a trainer do over CUDA IPC, with memory of their processes in the place of their cards'."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from helpers.pretend_cuda import Table
from helpers.rank_failures import attempt, begun
from helpers.rank_models import make, plain
from helpers.rank_ways import opened
from helpers.source_models import saved
from instep import WeightSync
from instep.engine.memory import MemoryEngine
from instep.errors import TransportError
from instep.ranks.ipc import Sharing
from instep.transport.ipc import driver

RANK = int(os.environ["RANK"])
ROWS = {"even": (8, 8), "uneven": (7, 8), "fewer rows than ranks": (1, 8), "cuts a word": (5, 3), "scale": (3, 1), "vector": (9,)}
"""Shapes of weights in bfloat16, sharded along their first dimension. A row of eight is two words, one of three less than one."""
STAGED = {"cuts a word", "scale", "vector"}


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in ROWS.items():
            self.register_parameter(name.replace(" ", "-"), nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)))


def begin(tp: int = 1) -> tuple[Any, Callable[[], dict[str, torch.Tensor]], MemoryEngine | None, WeightSync]:
    """A trainer of `Rows`, what all its ranks have together, the engine and the push."""
    torch.manual_seed(0)
    trainer: Any = fully_shard(Rows())

    def gathered() -> dict[str, torch.Tensor]:
        return {name: param.full_tensor().detach().clone() for name, param in trainer.named_parameters()}

    first = {name: torch.zeros_like(tensor) for name, tensor in gathered().items()}
    engine = MemoryEngine(first, tp=tp) if RANK == 0 else None
    return trainer, gathered, engine, opened(trainer, engine, "ipc")


def step(trainer: Any) -> None:
    for param in trainer.parameters():
        param._local_tensor.data.neg_().sub_(1)


def uneven() -> dict[str, Any]:
    """Pushes of weights whose shards are of many sizes. Which of them rank 0 brought together, and whether the engine has all."""
    trainer, gathered, engine, sync = begin()
    same, staged = [], set()
    for version in "abcd":
        step(trainer)
        sync.push(version)
        wanted = MemoryEngine(gathered()).fingerprint()
        same.append(engine is None or engine.fingerprint() == wanted)
        if engine:
            staged = set(_transport(sync).laid.staged)
    sync.close()
    return {"same": same, "staged": sorted(staged), "wanted": sorted(name.replace(" ", "-") for name in STAGED)}


def moves() -> dict[str, Any]:
    """Shards get other storage between pushes, on one rank and on all. How many tables each push makes on this rank."""
    trainer, gathered, engine, sync = begin()
    same, made = [], []
    for version, moving in zip("abcdefg", ("", "", "", "", "last", "all", ""), strict=True):
        step(trainer)
        if moving == "all" or (moving and int(os.environ["WORLD_SIZE"]) - 1 == RANK):
            for param in trainer.parameters():
                param._local_tensor.data = param._local_tensor.data.clone()
        Table.made = 0
        sync.push(version)
        made.append(Table.made)
        wanted = MemoryEngine(gathered()).fingerprint()
        same.append(engine is None or engine.fingerprint() == wanted)
    sync.close()
    return {"same": same, "made": made}


def not_finite() -> dict[str, Any]:
    """In the last rank's shard, in that of the first, and in a tensor that is brought together."""
    trainer, _, _, sync = begin()
    found = []
    for name, rank in (("even", 1), ("uneven", 0), ("vector", 1)):
        local = dict(trainer.named_parameters())[name]._local_tensor
        before = local.data.clone()
        if rank == RANK:
            local.data.view(-1)[-1] = float("nan")
        found.append(list(sync.push(f"nan-{name}").non_finite))
        local.data.copy_(before)
    found.append(list(sync.push("finite").non_finite))
    sync.close()
    return {"found": found}


def bytes_read(wrap: str) -> dict[str, Any]:
    """How many bytes workers pull into the layers that are copied directly, beside how many these hold; whether ranks formed a group."""
    trainer = make(wrap, "llama")
    engine = MemoryEngine(saved(plain("llama", seed=1)), tp=2) if RANK == 0 else None
    sync = opened(trainer.module, engine, "ipc")
    for version in ("v0", "v1"):
        for param in trainer.module.parameters():
            getattr(param, "ds_tensor", getattr(param, "_local_tensor", param)).data.neg_()
        sync.push(version)
    Table.moved.clear()
    direct = sync.push("v2").engines[0].direct
    role: Any = sync._role
    found: dict[str, Any] = {"grouped": (role.source if RANK == 0 else role).meeting.group is not None}
    if engine:
        live = [param for host in engine.hosts for param in host.model.parameters()]
        spans = [range(param.data_ptr(), param.data_ptr() + param.nbytes) for param in live]
        found["pulled"] = sum(8 * run.rows.numel for run in Table.moved if any(8 * run.rows.target in span for span in spans))
        found["held"] = held(sync, direct)
        found["direct"] = len(direct)
    sync.close()
    return found


def held(sync: WeightSync, layers: Sequence[str]) -> int:
    """Bytes that all workers copy into these layers."""
    session: Any = sync._session
    routes = (route for member in session.fleet.members for worker in member.plan.workers for route in worker.routes)
    return sum(2 * route.source.numel for route in routes if route.tensor and route.param.rpartition(".")[0] in layers)


def refuses(_: int) -> bytes:
    raise TransportError("cuIpcGetMemHandle failed with 1: invalid argument")


def share_fails() -> dict[str, Any]:
    """The driver does not share the last rank's memory: another transport brings the version, and says why. It is tried again."""
    trainer = make("fsdp2", "llama")
    engine = MemoryEngine(saved(plain("llama", seed=1))) if RANK == 0 else None
    sync = opened(trainer.module, engine, "ipc", transport="auto")
    last = int(os.environ["WORLD_SIZE"]) - 1 == RANK
    with patch.object(driver, "share", refuses if last else driver.share):
        receipt = sync.push("v0")
    same = engine is None or engine.fingerprint() == MemoryEngine(saved(trainer.gathered())).fingerprint()
    if RANK > 0:
        trainer.gathered()
    after = sync.push("v1")
    sync.close()
    return {"transport": receipt.transport, "why": receipt.why, "same": same, "after": after.transport}


def rank_dies(when: str) -> dict[str, Any]:
    """The last rank is killed before it has shared its memory, or before it has told its sums."""
    _, engine, sync = begun("ipc", timeout=60.0)
    sync.push("v0")
    if int(os.environ["WORLD_SIZE"]) - 1 == RANK:

        def dying(*_: Any) -> None:
            time.sleep(1.0 if when == "sums" else 0.0)
            os._exit(9)

        setattr(Sharing, when, dying)
    return {**attempt(lambda: sync.push("v1")), "refuses": bool(engine and engine.refusal)}


def engine_is_slow() -> dict[str, Any]:
    """A worker pulls late. When this rank's call returned, and when the worker had pulled, on one clock; likewise where it fails there."""
    _, engine, sync = begun("ipc")
    sync.push("v0")
    pulled: list[float] = []
    if engine:
        receiver = engine.receivers[0]
        handle = receiver.handle

        def slow(method: str, payload: bytes) -> bytes:
            if method != "commit":
                return handle(method, payload)
            time.sleep(0.5)
            reply = handle(method, payload)
            pulled.append(time.monotonic())
            return reply

        receiver.handle = slow
    found: dict[str, Any] = {"returned": []}
    for fails in (False, True):
        if engine and fails:
            engine.inject("label", "error")
        error = attempt(lambda fails=fails: sync.push(f"v1-{fails}"))["error"]
        found["returned"].append((error, time.monotonic()))
    sync.close()
    return {**found, "pulled": pulled}


def _transport(sync: WeightSync) -> Any:
    return sync._session.transport.candidates["ipc"]


IPC: dict[str, Callable[..., dict[str, Any]]] = {
    "ipc-uneven": uneven,
    "ipc-moves": moves,
    "ipc-not-finite": not_finite,
    "ipc-bytes-read": bytes_read,
    "ipc-share-fails": share_fails,
    "ipc-rank-dies": rank_dies,
    "ipc-engine-is-slow": engine_is_slow,
}
