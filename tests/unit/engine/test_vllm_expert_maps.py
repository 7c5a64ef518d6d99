"""Experts in several workers: what the proof wants of them, and which engines cannot be followed. vLLM's configuration is a stand-in."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, ToyHost, bits
from torch import nn

from instep import MemoryEngine, WeightSync
from instep.engine.vllm.engine import adapt
from instep.engine.vllm.experts import apart, check_experts_stay
from instep.engine.vllm.worker import VllmHost
from instep.errors import ConfigError, PlanError
from instep.receiver.state import Receiver

EXPERTS = 5


class Experts(nn.Module):
    """A router, and a worker's part of the experts."""

    def __init__(self, local: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, EXPERTS, bias=False), nn.Module()
        self.experts.weight = nn.Parameter(torch.zeros(local, 3, 4))


class Worker(ToyHost):
    """places: which of its places an expert has, as a map of vLLM's tells its loader."""

    def __init__(self, rank: int, size: int, experts: Iterable[int]) -> None:
        self.places = {expert: place for place, expert in enumerate(experts)}
        super().__init__(Experts(len(self.places)), self.take)
        self.rank, self.world_size = rank, size

    def take(self, model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name == "router.weight":
            model.get_parameter(name).copy_(tensor)
        elif (place := self.places.get(int(name.split(".")[1]))) is not None:
            model.get_parameter("experts.weight")[place].copy_(tensor)


def checkpoint(seed: int) -> Checkpoint:
    torch.manual_seed(seed)
    return {"router.weight": torch.randn(EXPERTS, 4), **{f"experts.{expert}.weight": torch.randn(3, 4) for expert in range(EXPERTS)}}


def engine(*experts: Iterable[int]) -> MemoryEngine:
    """A worker for each."""
    made: Any = MemoryEngine({"w": torch.zeros(1)}, tp=len(experts))
    made.hosts = [Worker(rank, len(experts), of) for rank, of in enumerate(experts)]
    for host in made.hosts:
        vars(host).update(fail_at=None, failed=False)
    made.receivers = [Receiver(host) for host in made.hosts]
    engine: MemoryEngine = made
    return engine


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("experts", [((0, 1, 2), (3, 4)), ((0, 2, 4), (1, 3)), ((0, 1, 2, 3, 4), (4, 0, 3))])
def test_each_worker_takes_the_experts_that_its_loader_takes(experts: Any) -> None:
    """In one stretch, in turn, and some of them twice."""
    found, weights = engine(*experts), checkpoint(1)
    with WeightSync(weights, [found]) as sync:
        for version in "abc":
            for tensor in weights.values():
                tensor.mul_(-1.5)
            receipt = sync.push(version).engines[0]
            for host, own in zip(found.hosts, experts, strict=True):
                held = host.model.get_parameter("experts.weight")
                assert all(torch.equal(bits(held[place]), bits(weights[f"experts.{expert}.weight"])) for place, expert in enumerate(own))
    assert receipt.direct == ("experts", "router")


@pytest.mark.usefixtures("segments")
def test_an_expert_that_no_worker_takes_is_refused() -> None:
    with WeightSync(checkpoint(1), [engine((0, 1), (2, 3))]) as sync, pytest.raises(PlanError, match=r"no place for experts\.4\.weight"):
        sync.push("v1")


@pytest.mark.usefixtures("segments")
def test_an_expert_that_the_trainer_lacks_is_refused() -> None:
    weights = {name: tensor for name, tensor in checkpoint(1).items() if name != "experts.3.weight"}
    with WeightSync(weights, [engine((0, 1, 2), (3, 4))]) as sync, pytest.raises(PlanError, match=r"rank 1: experts\.weight .* in part"):
        sync.push("v1")


def config(**parallel: Any) -> Any:
    given = {"data_parallel_size": 1, "worker_extension_cls": "x", "enable_eplb": False, **parallel}
    return SimpleNamespace(parallel_config=SimpleNamespace(**given), model_config=SimpleNamespace(is_moe=True), weight_transfer_config=None)


def test_an_engine_that_moves_experts_while_it_serves_is_refused_by_name() -> None:
    check_experts_stay(config())
    host: Any = VllmHost.__new__(VllmHost)
    host.worker = SimpleNamespace(vllm_config=config(enable_eplb=True))
    with pytest.raises(PlanError, match="enable_eplb") as caught, host.checkpoint_layout():
        pass
    assert "start the engine without enable_eplb" in str(caught.value)


@pytest.mark.parametrize(
    ("reached", "parallel", "alone"),
    [
        (1, {"data_parallel_size": 2}, True),
        (1, {"data_parallel_size": 2, "is_moe_model": True}, True),
        (1, {"data_parallel_size": 2, "is_moe_model": False}, False),
        (2, {"data_parallel_size": 2}, False),
        (1, {}, False),
    ],
)
def test_a_rank_that_has_a_part_of_the_experts_is_no_engine(reached: int, parallel: Any, alone: bool) -> None:
    client = SimpleNamespace(core_engines=[object()] * reached)
    assert (apart(config(**parallel), client) is not None) == alone


def test_such_a_rank_is_refused_with_what_to_start_instead() -> None:
    kind = type("LLM", (), {"collective_rpc": lambda self: None, "__module__": "vllm.entrypoints.llm"})
    llm: Any = kind()
    client = SimpleNamespace(core_engines=[object()])
    llm.llm_engine = SimpleNamespace(vllm_config=config(data_parallel_size=4), engine_core=client)
    with pytest.raises(ConfigError, match="1 of the 4 data-parallel ranks") as caught:
        adapt(llm)
    assert "AsyncLLM(data_parallel_size=...)" in str(caught.value)
