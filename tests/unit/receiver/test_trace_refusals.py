"""A loader that cannot be traced is refused with the reason, and with advice that fits it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from helpers.toys import ToyHost, bits, described
from torch import nn

from instep.errors import PlanError
from instep.receiver.apply import Applier
from instep.receiver.layout import Layout, shape_only
from instep.receiver.trace import trace

X = torch.arange(24.0).reshape(4, 6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Module(), nn.Module()
        self.layer.weight = nn.Parameter(torch.full((4, 6), 7.0))
        self.layer.bias = nn.Parameter(torch.full((4, 6), 7.0))
        self.other.weight = nn.Parameter(torch.full((4, 6), 7.0))


def refused(load: Callable[[nn.Parameter, torch.Tensor], object]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        trace(ToyHost(Model(), lambda model, name, tensor: load(model.layer.weight, tensor)), described({"w": X}))
    return caught.value


BY_VALUE: dict[str, Callable[[nn.Parameter, torch.Tensor], object]] = {
    "a list": lambda w, x: x.tolist(),
    "numpy": lambda w, x: x.numpy(),
    "an array": lambda w, x: np.asarray(x),
    "a mask": lambda w, x: w.copy_(x[x > 0]),
    "indices": lambda w, x: torch.nonzero(x),
    "distinct values": lambda w, x: x.unique(),
    "a comparison": lambda w, x: torch.equal(x, x),
}


@pytest.mark.parametrize("load", BY_VALUE.values(), ids=BY_VALUE)
def test_a_loader_that_decides_by_values_is_not_told_to_change_names(load: Callable[[nn.Parameter, torch.Tensor], object]) -> None:
    error = refused(load)
    assert error.tensor == "w"
    assert "names and shapes are not at fault" in str(error)


@pytest.mark.parametrize("error", [KeyError("w"), ValueError("no parameter w"), AssertionError("size"), RuntimeError("size")])
def test_a_loader_that_does_not_know_a_tensor_asks_for_the_checkpoint_s_names(error: Exception) -> None:
    def load(w: nn.Parameter, x: torch.Tensor) -> None:
        raise error

    assert "give the source the names, shapes and dtypes of the checkpoint" in str(refused(load))


def test_a_loader_that_fails_in_another_way_is_not_said_to_miss_names() -> None:
    def load(w: Any, x: torch.Tensor) -> None:
        w.no_such_attribute()

    text = str(refused(load))
    assert "refuses w [4, 6]: AttributeError" in text
    assert "If they are the same, the loader fails on tensors without bytes" in text


class Blind(ToyHost):
    """Its reload session loads into other tensors, and puts back what it has not noticed."""

    rebuilt: list[str]

    @contextmanager
    def checkpoint_layout(self):
        class Unnoticed(Layout):
            def unnoticed(self) -> list[str]:
                return ["layer"]

        with shape_only(self.model):
            yield Unnoticed()

    @contextmanager
    def reload(self):
        layer = self.model.layer
        before = dict(layer._parameters)
        for name, param in before.items():
            layer._parameters[name] = nn.Parameter(torch.empty_like(param), requires_grad=False)
        with super().reload():
            yield
        layer._parameters.update(before)

    def rebuild(self, layer: str, fill) -> None:
        self.rebuilt = [*getattr(self, "rebuilt", []), layer]
        fill(dict(self.model.get_submodule(layer).named_parameters()))

    def refresh(self) -> None:
        pass


def by_name(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 6, generator=generator) for name in ("layer.weight", "layer.bias", "other.weight")}


def test_a_layer_that_the_session_would_leave_as_it_is_is_made_from_copies() -> None:
    model, version = Model(), tensors(1)
    host = Blind(model, by_name)
    plan = trace(host, described(version))
    assert plan.unnoticed == ["layer"]
    Applier(host, plan).session(version)
    assert host.rebuilt == ["layer"]
    assert host.loaded == ["other.weight"]
    assert all(torch.equal(bits(model.get_parameter(name)), bits(tensor)) for name, tensor in version.items())


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda w, x: w.copy_(x + 1), "the loader computes its values on the way"),
        (lambda w, x: (w[:2].copy_(x[:2]), w[2:].fill_(3)), "the loader fills a part of it with a number"),
    ],
)
def test_what_neither_copies_nor_a_session_bring_is_refused(load: Callable[[nn.Parameter, torch.Tensor], object], why: str) -> None:
    host = Blind(Model(), lambda model, name, tensor: load(model.get_parameter(name), tensor))
    with pytest.raises(PlanError, match=f"layer.weight: {why}, and the loader writes past") as caught:
        trace(host, described(tensors(1)))
    assert "neither plain copies nor the engine's reload session" in str(caught.value)


def test_a_session_is_given_copies_of_tensors_that_the_loader_writes_into() -> None:
    model, version = Model(), tensors(1)
    before = {name: tensor.clone() for name, tensor in version.items()}
    host = ToyHost(model, lambda model, name, tensor: model.get_parameter(name).copy_(tensor.mul_(2)))
    Applier(host, trace(host, described(version))).session(version)
    assert all(torch.equal(version[name], before[name]) for name in before)
    assert all(torch.equal(model.get_parameter(name), 2 * before[name]) for name in before)
