"""Small things that tests push to and from: checkpoints, and a worker whose loader is one function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from instep.protocol import TensorMeta
from instep.receiver import Fill, PlainHost
from instep.receiver.apply import Applier
from instep.receiver.arrival import Seen
from instep.receiver.layout import Layout, shape_only
from instep.receiver.trace import trace

Checkpoint = dict[str, torch.Tensor]


def checkpoint(seed: int = 0, *, layers: int = 2, tied: bool = False, moe: bool = False, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    """A model as `save_pretrained` would name it: hidden size 8, two heads of four, one head for k and v, vocabulary of 20."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,), "model.temperature": ()}
    for layer in (f"model.layers.{index}" for index in range(layers)):
        shapes |= {f"{layer}.input_layernorm.weight": (8,)}
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (rows, 8) for part, rows in (("q", 8), ("k", 4), ("v", 4))}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (8, 8)}
        if moe:
            shapes |= {f"{layer}.mlp.gate.weight": (3, 8)}
        for mlp in [f"{layer}.mlp.experts.{expert}" for expert in range(3)] if moe else [f"{layer}.mlp"]:
            shapes |= {f"{mlp}.gate_proj.weight": (12, 8), f"{mlp}.up_proj.weight": (12, 8), f"{mlp}.down_proj.weight": (8, 12)}
    if not tied:
        shapes |= {"lm_head.weight": (20, 8)}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def attention(seed: int) -> Checkpoint:
    """The least of a model that has a fused layer, a derived tensor, padding and a tied head: for tests that push often."""
    kept = ("embed_tokens", "q_proj", "k_proj", "v_proj", "model.norm")
    return {name: tensor for name, tensor in checkpoint(seed, layers=1).items() if any(part in name for part in kept)}


def described(tensors: Checkpoint) -> list[TensorMeta]:
    return [TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def differing(expected: nn.Module, found: nn.Module) -> list[str]:
    """Parameters and buffers that are not the same bits."""
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    have = {**dict(found.named_parameters()), **dict(found.named_buffers())}
    assert wanted.keys() == have.keys()
    return [name for name in wanted if not torch.equal(bits(wanted[name]), bits(have[name]))]


def bare() -> Any:
    """A module to which a test gives what it likes."""
    return nn.Module()


class ToyFresh:
    """All of a second model is loaded at once."""

    def __init__(self, model: nn.Module, load: Callable[[Any, str, torch.Tensor], object], finish: Callable[[Any], object]) -> None:
        self.model: Any = model.requires_grad_(False)
        self.load, self.finish = load, finish

    def units(self) -> list[dict[str, str]]:
        return [{name: name for name, _ in self.model.named_modules()}]

    @contextmanager
    def loading(self, unit: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
        for name, tensor in tensors:
            self.load(self.model, name, tensor)
        self.finish(self.model)
        yield

    def computes(self, layer: str) -> torch.Tensor:
        return self.model.get_submodule(layer).computes()

    def rebuild(self, layer: str, fill: Fill) -> None:
        raise NotImplementedError

    def refresh(self) -> None:
        pass


class ToyHost(PlainHost):
    """A worker of one rank. `fill(model, name, tensor)` loads one checkpoint tensor, `finish(model)` ends a reload session.

    The model is `Any`, so that a test may name its layers: `host.model.a.weight`.
    """

    rank, world_size, device = 0, 1, "cpu"
    software = "toy 1.2"

    def __init__(
        self,
        model: nn.Module,
        fill: Callable[[Any, str, torch.Tensor], object],
        finish: Callable[[Any], object] = lambda model: None,
    ) -> None:
        self.model: Any = model.requires_grad_(False)
        self.fill, self.finish = fill, finish
        self.sessions = 0
        self.loaded: list[str] = []

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded = []
        for name, tensor in tensors:
            self.fill(self.model, name, tensor)
            self.loaded.append(name)

    def checkpoint_layout(self) -> AbstractContextManager[Layout]:
        return shape_only(self.model)

    @contextmanager
    def reload(self) -> Iterator[None]:
        self.sessions += 1
        yield
        self.finish(self.model)

    def spare(self, parameter: str) -> tuple[int, str | None]:
        return 0, None


def start(host: ToyHost, tensors: Checkpoint) -> Applier:
    """An engine that has loaded its first weights, and the applier of its first push."""
    with host.reload():
        host.load(tensors.items())
    return Applier(host, trace(host, described(tensors)))


def push(applier: Applier, tensors: Checkpoint) -> None:
    with torch.no_grad():
        arrival = Seen(tensors, described(tensors))
        applier.apply(arrival)
        arrival.prove(applier)
