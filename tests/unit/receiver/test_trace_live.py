"""Tracing never touches live storage: whatever a loader would write to in use is refused before it is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from helpers.toys import ToyHost, described
from torch import nn

from instep.errors import PlanError
from instep.plan.region import view
from instep.receiver.trace import trace

X = torch.arange(24.0).reshape(4, 6)
POISON = 1234.5


class Poisoned(nn.Module):
    """A model with tensors in all the places where modules keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 6), POISON))
        self.table: torch.Tensor
        self.register_buffer("table", torch.full((4, 6), POISON))
        self.scratch = torch.full((4, 6), POISON)
        self.kept = {"by expert": [torch.full((4, 6), POISON)]}
        self.alias = [self.weight]
        hidden = torch.full((4, 6), POISON)
        self.hidden = lambda: hidden

    def live(self) -> list[torch.Tensor]:
        return [self.weight, self.table, self.scratch, self.kept["by expert"][0], self.hidden()]


Write = Callable[[torch.Tensor, torch.Tensor], object]
WAYS: dict[str, Write] = {
    "copy_": lambda live, x: live.copy_(x),
    "through .data": lambda live, x: live.data.copy_(x),
    "a view": lambda live, x: live[1:2].data.copy_(x[1:2]),
    "fill_": lambda live, x: live.fill_(3),
    "zero_": lambda live, x: live.zero_(),
    "add_": lambda live, x: live.add_(1),
    "set an element": lambda live, x: live.__setitem__((0, 0), 1.0),
    "index_put": lambda live, x: live.__setitem__(torch.tensor([0]), 1.0),
    "a list of tensors": lambda live, x: torch._foreach_add_([live], 1.0),
    "out=": lambda live, x: torch.add(torch.ones(4, 6), 1, out=live),
    "a copy of made values": lambda live, x: live.copy_(torch.ones(4, 6)),
    "another storage": lambda live, x: live.set_(torch.ones(4, 6).untyped_storage()),
    "resize": lambda live, x: live.resize_(2, 2),
}
PLACES: dict[str, tuple[Callable[[Poisoned, dict[str, torch.Tensor]], torch.Tensor], str]] = {
    "a plain attribute": (lambda model, _: model.scratch, "scratch"),
    "in a list in a dict": (lambda model, _: model.kept["by expert"][0], "kept"),
    "in a closure": (lambda model, _: model.hidden(), "memory that is no module's attribute"),
    "a live parameter": (lambda _, live: live["weight"], "weight"),
    "a live buffer": (lambda _, live: live["table"], "table"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_a_loader_that_writes_to_live_memory_is_stopped_before_it_writes(place: str, way: str) -> None:
    model = Poisoned()
    find, where = PLACES[place]
    live = {"weight": model.weight, "table": model.table}
    host = ToyHost(model, lambda model, name, tensor: WAYS[way](find(model, live), tensor))
    before = [(tensor, tensor.data_ptr()) for tensor in model.live()]
    with pytest.raises(PlanError, match=rf"given w, was stopped before it changed .*{where}.* by \w+") as caught:
        trace(host, described({"w": X}))
    assert caught.value.tensor == "w"
    assert "Start the engine from each checkpoint anew" in str(caught.value)
    for tensor, address in before:
        assert tensor.data_ptr() == address
        assert tensor.shape == (4, 6)
        assert (tensor == POISON).all()


def test_a_loader_that_swallows_the_refusal_is_refused_all_the_same() -> None:
    model = Poisoned()

    def load(model: Poisoned, name: str, tensor: torch.Tensor) -> None:
        with suppress(Exception):
            model.scratch.zero_()
        model.weight.copy_(tensor)

    with pytest.raises(PlanError, match="was stopped before it changed scratch"):
        trace(ToyHost(model, load), described({"w": X}))
    assert (model.scratch == POISON).all()


@pytest.mark.parametrize("outlet", [lambda live: live.numpy(), np.asarray, np.from_dlpack])
def test_what_a_loader_takes_out_of_pytorch_is_a_copy(outlet: Callable[[torch.Tensor], np.ndarray]) -> None:
    model, seen = Poisoned(), []

    def load(model: Poisoned, name: str, tensor: torch.Tensor) -> None:
        array = outlet(model.scratch)
        seen.append(float(array[0, 0]))
        array[:] = 0
        model.weight.copy_(tensor)

    with suppress(ValueError):  # NumPy marks what comes by dlpack as read-only
        trace(ToyHost(model, load), described({"w": X}))
    assert set(seen) == {POISON}
    assert (model.scratch == POISON).all()


def test_what_a_loader_makes_for_itself_it_may_write() -> None:
    def load(model: Poisoned, name: str, tensor: torch.Tensor) -> None:
        model.weight.copy_(tensor)
        for made in (torch.zeros(3), torch.tensor([1.0, 2.0]), torch.arange(3.0)[1:], model.scratch.clone(), torch.empty_like(tensor)):
            made.add_(1)
        torch.from_numpy(torch.ones(2).numpy()).mul_(2)

    model = Poisoned()
    model.register_buffer("table", None)
    plan = trace(ToyHost(model, load), described({"w": X}))
    assert [route.param for route in plan.routes] == ["weight"]


ANEW: dict[str, tuple[Callable[[nn.Module, torch.Tensor], object], dict[str, str]]] = {
    "a parameter of its own": (lambda model, x: fill(make(model), x), {}),
    "a padded one": (lambda model, x: fill(make(model, 6), x), {}),
    "the checkpoint's tensor": (lambda model, x: setattr(model, "weight", nn.Parameter(x, requires_grad=False)), {}),
    "a part of it, as .data": (lambda model, x: setattr(model.weight, "data", x[:, 2:4]), {}),
    "a sum": (lambda model, x: setattr(model.weight, "data", x + 1), {"": "the loader puts another tensor in its place"}),
    "computed on the way": (lambda model, x: fill(make(model), x * 2), {"": "the loader computes its values on the way"}),
}


def make(model: nn.Module, rows: int = 4) -> nn.Parameter:
    model.weight = nn.Parameter(torch.empty(rows, 6), requires_grad=False)
    return model.weight


def fill(weight: nn.Parameter, x: torch.Tensor) -> None:
    weight[: len(x)].data.copy_(x)
    weight[len(x) :].data.fill_(0)


@pytest.mark.parametrize(("load", "reload_only"), ANEW.values(), ids=ANEW)
def test_parameters_that_a_loader_makes_anew_are_traced(
    load: Callable[[nn.Module, torch.Tensor], object], reload_only: dict[str, str]
) -> None:
    """As the bias of a head that a checkpoint turns out to have."""
    model = nn.Module()
    live = model.weight = nn.Parameter(torch.full((4, 6), POISON))
    plan = trace(ToyHost(model, lambda model, name, tensor: load(model, tensor)), described({"w": X}))
    assert model.weight is live
    assert (live == POISON).all()
    assert plan.reload_only == reload_only
    assert plan.computed.keys() == ({"w"} if reload_only else set())
    if not reload_only:
        loaded = nn.Module()
        loaded.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        load(loaded, X)
        replayed = torch.zeros_like(loaded.weight)
        for route in plan.routes:
            if route.tensor is not None:
                assert route.source is not None
                assert route.target is not None
                view(replayed, route.target).copy_(view(X, route.source))
        assert torch.equal(replayed, loaded.weight)


def test_a_parameter_that_a_loader_adds_is_refused_by_its_name() -> None:
    model = nn.Module()
    with pytest.raises(PlanError, match="the engine's loader adds weight, which the model that runs there has not"):
        trace(ToyHost(model, lambda model, name, tensor: fill(make(model), tensor)), described({"w": X}))
    assert not dict(model.named_parameters())


def test_a_loader_may_gather_a_tensor_in_memory_of_its_own() -> None:
    def load(model: Poisoned, name: str, tensor: torch.Tensor) -> None:
        gathered = torch.empty(4, 6)
        gathered[:2].copy_(tensor[2:])
        gathered[2:].copy_(tensor[:2])
        model.weight.copy_(gathered)

    model = Poisoned()
    plan = trace(ToyHost(model, load), described({"w": X}))
    assert plan.reload_only == {"": "the loader computes its values on the way"}
    assert plan.computed.keys() == {"w"}


def test_attributes_that_a_loader_sets_are_as_they_were_after_the_trace() -> None:
    """... or the model would go on with tensors that have no bytes."""

    def load(model: Any, name: str, tensor: torch.Tensor) -> None:
        model.weight.copy_(tensor)
        model.scratch = tensor.clone()
        model.loaded = True

    model = Poisoned()
    scratch, attributes = model.scratch, set(vars(model))
    trace(ToyHost(model, load), described({"w": X, "t": X}))
    assert model.scratch is scratch
    assert set(vars(model)) == attributes


def test_memory_that_a_loader_takes_from_a_live_parameter_is_given_back() -> None:
    model = Poisoned()
    live = model.weight
    host = ToyHost(model, lambda model, name, tensor: setattr(live, "data", torch.zeros(4, 6)))
    address = live.data_ptr()
    trace(host, described({"w": X}))
    assert live.data_ptr() == address
    assert (live == POISON).all()
