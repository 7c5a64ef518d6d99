"""When CUDA IPC brings the shards of several ranks, and when another transport has to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.protocol import Identity
from instep.ranks.ipc import SharedIpc
from instep.ranks.lead import RankedSource
from instep.transport import host


def worker(**other: Any) -> Identity:
    told: dict[str, Any] = {"device": "cuda:1", "host": host(), **other}
    return Identity("a", 0, 1, gpu=None, pid=1, plan_signature=None, prepared=None, holding=[], **told)


def considered(device: str = "cuda:0", *, spread: bool = False, **other: Any) -> str | None:
    channel: Any = SimpleNamespace(spread=spread)
    module: Any = None
    return SharedIpc(RankedSource(module, channel)).why_not(torch.device(device), [worker(), worker(**other)])


def test_ranks_and_workers_on_gpus_of_one_host_share_their_memory() -> None:
    assert considered() is None


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"device": "cpu"}, "the trainer's tensors are on cpu"),
        ({"spread": True}, "a rank of the trainer is on another host"),
        ({"host": "elsewhere"}, "an engine is on another host"),
    ],
)
def test_otherwise_it_says_why_not(setting: dict[str, Any], reason: str) -> None:
    assert considered(**setting) == reason
