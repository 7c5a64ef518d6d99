"""Layers that the engine packs: they may be packed anew from copied regions once that is proved to follow the weights (invariant 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, ToyHost, described
from torch import nn

from instep.receiver import Fill
from instep.receiver.apply import Applier
from instep.receiver.arrival import Seen
from instep.receiver.trace import trace

NAMES = ("a.weight", "b.weight")


class Model(nn.Module):
    """Two layers whose weights are packed after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        for layer in (self.a, self.b):
            layer.register_parameter("weight", nn.Parameter(torch.zeros(4, 6)))


def weights(seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 6, generator=generator) for name in NAMES}


def fill_one(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


def pack(layer: Any) -> None:
    layer.packed = layer.weight.t().contiguous()


def pack_all(model: Any) -> None:
    pack(model.a)
    pack(model.b)


class PackingHost(ToyHost):
    """`repack(layer)` is what a rebuild does after the weights are in place."""

    def __init__(self, repack: Callable[[nn.Module], object] = pack, finish: Callable[[nn.Module], object] = pack_all) -> None:
        super().__init__(Model(), fill_one, finish)
        self.repack = repack
        self.refreshed = 0

    def rebuilds(self, layer: str) -> bool:
        return layer in ("a", "b")

    def rebuild(self, layer: str, fill: Fill) -> None:
        module = self.model.get_submodule(layer)
        fill({"weight": module.weight})
        self.repack(module)

    def computes(self, layer: str) -> torch.Tensor:
        return torch.linspace(-1, 1, 18).view(3, 6) @ self.model.get_submodule(layer).packed

    def refresh(self) -> None:
        self.refreshed += 1


def start(host: ToyHost) -> Applier:
    with host.reload():
        host.load(weights(0).items())
    return Applier(host, trace(host, described(weights(0))))


class Once(dict[str, torch.Tensor]):
    """Tensors that are gone when they have been asked for."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.pop(name)

    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


class Passing(Seen):
    """Bytes that pass by: those that are asked for in turn are not kept."""

    once = True

    def move(self, *arguments: Any, in_turn: bool) -> Any:
        tensors = super().move(*arguments, in_turn=in_turn)
        return Once(tensors) if in_turn else tensors


def push(applier: Applier, seed: int, kind: type[Seen] = Seen) -> None:
    arrival = kind(weights(seed), described(weights(seed)))
    with torch.no_grad():
        applier.apply(arrival)
        arrival.prove(applier)


def check(host: ToyHost, seed: int) -> None:
    for name, tensor in weights(seed).items():
        assert torch.equal(host.model.get_parameter(name), tensor)
        assert torch.equal(host.model.get_submodule(name[0]).packed, tensor.t())


def test_layers_are_packed_without_a_session_after_the_first_push() -> None:
    host = PackingHost()
    applier = start(host)
    push(applier, 1)
    check(host, 1)
    assert (applier.rebuild, applier.direct, applier.reload) == ({"a", "b"}, set(), {})
    sessions = host.sessions
    for seed in (2, 3):
        push(applier, seed)
        check(host, seed)
    assert host.sessions == sessions
    assert host.refreshed >= 2


def test_where_bytes_pass_by_they_are_after_the_second() -> None:
    """The first hands each tensor to the loader and keeps none to try a rebuild with."""
    host = PackingHost()
    applier = start(host)
    push(applier, 1, Passing)
    check(host, 1)
    assert (applier.rebuild, set(applier.reload)) == (set(), {"a", "b"})
    push(applier, 2, Passing)
    check(host, 2)
    assert (applier.rebuild, applier.reload) == ({"a", "b"}, {})
    sessions = host.sessions
    push(applier, 3, Passing)
    check(host, 3)
    assert host.sessions == sessions


def test_unchanged_weights_prove_nothing() -> None:
    host = PackingHost()
    applier = start(host)
    push(applier, 0)
    check(host, 0)
    push(applier, 1)
    check(host, 1)
    push(applier, 2)
    check(host, 2)


def lazy(layer: nn.Module) -> None:
    if not hasattr(layer, "packed"):
        pack(layer)


def nothing(layer: nn.Module) -> None:
    pass


def wrong(layer: Any) -> None:
    layer.packed = layer.weight.t().contiguous() + 1


@pytest.mark.parametrize("repack", [lazy, nothing, wrong])
def test_a_rebuild_that_does_not_follow_the_weights_is_not_used(repack: Callable[[nn.Module], object]) -> None:
    """What it makes of the weights that are packed already says nothing: a rebuild that does nothing makes the same."""
    host = PackingHost(repack)
    applier = start(host)
    for seed in (1, 2, 3):
        push(applier, seed)
        check(host, seed)
    assert applier.rebuild == set()
    assert set(applier.reload) == {"a", "b"}
