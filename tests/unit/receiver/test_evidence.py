"""Wherever an engine keeps what it derives from a layer's weights, the first push finds it, and it follows every push (invariant 5)."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.toys import Checkpoint, ToyHost, bare, push, start
from torch import nn

from instep.receiver.evidence import Holdings

ROWS = 96


class Slotted:
    __slots__ = ("kept",)


class Plain:
    """Holds one thing. What a layer hands to a kernel is often such an object."""

    kept: Any = None

    def call(self) -> Any:
        return self.kept


class Cache(dict[str, Any]):
    """A dictionary with an attribute."""


class OfAll:
    """Keeps for all of its objects."""

    kept: Any = None


class Shared:
    caches: dict[str, Any] = {}  # noqa: RUF012


class Derived(Shared):
    """Inherits what is kept."""


class Model(nn.Module):
    """Layer `a`, whose weights something is derived from, and `beside` it a module without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a: Any = nn.Linear(ROWS, ROWS, bias=False)
        self.beside = bare()
        self.other = nn.Linear(3, 3, bias=False)
        self.beside.box = {"x": {"y": [{}]}}
        self.beside.slotted, self.beside.plain, self.beside.cache = Slotted(), Plain(), Cache()
        self.beside.items = [None]
        self.beside.queue, self.beside.pair = deque([None]), (Plain(), 1)
        self.beside.hidden = [nn.Linear(ROWS, ROWS)]  # in a list, so that it is no module of the model
        self.beside.of_all, self.beside.derived = OfAll(), Derived()
        self.beside.space = SimpleNamespace(deep=SimpleNamespace())


def fill(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


def in_place(get: Callable[[Model], Any]) -> Callable[[Model, torch.Tensor], None]:
    def keep(model: Model, value: torch.Tensor) -> None:
        get(model).copy_(value)

    return keep


def closure(model: Model, value: torch.Tensor) -> None:
    if not hasattr(model.beside, "run"):
        model.beside.run = lambda: value
    model.beside.run.__closure__[0].cell_contents.copy_(value)


def partial(model: Model, value: torch.Tensor) -> None:
    if not hasattr(model.beside, "run"):
        model.beside.run = functools.partial(torch.add, value, alpha=1)
    model.beside.run.args[0].copy_(value)


def method(model: Model, value: torch.Tensor) -> None:
    owner = model.beside.run.__self__ if hasattr(model.beside, "run") else Plain()
    owner.kept, model.beside.run = value, owner.call


def method_of_a_tensor(model: Model, value: torch.Tensor) -> None:
    if not hasattr(model.beside, "run"):
        model.beside.run = value.matmul
    model.beside.run.__self__.copy_(value)


def parameter(model: Model, value: torch.Tensor) -> None:
    if "kept" not in model.beside._parameters:
        model.beside.register_parameter("kept", nn.Parameter(value, requires_grad=False))
    model.beside._parameters["kept"].data.copy_(value)


def array(model: Model, value: torch.Tensor) -> None:
    model.beside.plain.kept = value.numpy().copy()


def beside_the_weights_in_their_memory(model: Model, value: torch.Tensor) -> None:
    """One storage for both, as packed layouts have it."""
    if not hasattr(model.beside, "kept"):
        room = torch.empty(2 * ROWS, ROWS)
        room[:ROWS].copy_(model.a.weight)
        model.a.weight.data, model.beside.kept = room[:ROWS], room[ROWS:]
    model.beside.kept.copy_(value)


def between_the_weights_in_their_memory(model: Model, value: torch.Tensor) -> None:
    if not hasattr(model.beside, "kept"):
        room = torch.empty(ROWS, 2 * ROWS)
        room[:, :ROWS].copy_(model.a.weight)
        model.a.weight.data, model.beside.kept = room[:, :ROWS], room[:, ROWS:]
    model.beside.kept.copy_(value)


PLACES: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda m, v: setattr(m.beside, "kept", v), lambda m: m.beside.kept),
    "of the layer itself": (lambda m, v: setattr(m.a, "kept", v), lambda m: m.a.kept),
    "another layer": (lambda m, v: setattr(m.other, "kept", v), lambda m: m.other.kept),
    "quantisation method": (lambda m, v: setattr(m.a, "quant_method", SimpleNamespace(kept=v)), lambda m: m.a.quant_method.kept),
    "list that stays": (lambda m, v: m.beside.items.__setitem__(0, v), lambda m: m.beside.items[0]),
    "list that is replaced": (lambda m, v: setattr(m.beside, "items", [v]), lambda m: m.beside.items[0]),
    "object": (lambda m, v: setattr(m.beside.plain, "kept", v), lambda m: m.beside.plain.kept),
    "object with slots": (lambda m, v: setattr(m.beside.slotted, "kept", v), lambda m: m.beside.slotted.kept),
    "object in a tuple": (lambda m, v: setattr(m.beside.pair[0], "kept", v), lambda m: m.beside.pair[0].kept),
    "four containers deep": (lambda m, v: m.beside.box["x"]["y"][0].update(kept=v), lambda m: m.beside.box["x"]["y"][0]["kept"]),
    "namespaces": (lambda m, v: setattr(m.beside.space.deep, "kept", v), lambda m: m.beside.space.deep.kept),
    "queue": (lambda m, v: m.beside.queue.__setitem__(0, v), lambda m: m.beside.queue[0]),
    "attribute of a dictionary": (lambda m, v: setattr(m.beside.cache, "kept", v), lambda m: m.beside.cache.kept),
    "attribute of the parameter": (lambda m, v: setattr(m.a.weight, "kept", v), lambda m: m.a.weight.kept),
    "module that is not registered": (
        lambda m, v: m.beside.hidden[0].weight.data.copy_(v),
        lambda m: m.beside.hidden[0].weight,
    ),
    "derived parameter": (parameter, lambda m: m.beside._parameters["kept"]),
    "buffer": (lambda m, v: m.beside.register_buffer("kept", v), lambda m: m.beside.kept),
    "buffer that is not saved": (lambda m, v: m.beside.register_buffer("kept", v, persistent=False), lambda m: m.beside.kept),
    "closure": (closure, lambda m: m.beside.run()),
    "partial": (partial, lambda m: m.beside.run.args[0]),
    "bound method": (method, lambda m: m.beside.run.__self__.kept),
    "method of a tensor": (method_of_a_tensor, lambda m: m.beside.run.__self__),
    "class of an object": (lambda m, v: setattr(OfAll, "kept", v), lambda m: OfAll.kept),
    "dictionary of a class": (lambda m, v: Shared.caches.update(kept=v), lambda m: Shared.caches["kept"]),
    "hook": (lambda m, v: m.beside._forward_hooks.update({0: functools.partial(print, v)}), lambda m: m.beside._forward_hooks[0].args[0]),
    "array of numpy": (array, lambda m: torch.from_numpy(m.beside.plain.kept)),
    "in the weights' storage": (beside_the_weights_in_their_memory, lambda m: m.beside.kept),
    "between the weights": (between_the_weights_in_their_memory, lambda m: m.beside.kept),
    "on the model": (lambda m, v: setattr(m, "kept", v), lambda m: m.kept),
    "sparse": (lambda m, v: setattr(m.beside, "kept", v.to_sparse()), lambda m: m.beside.kept.to_dense()),
}


def weights(seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n, n, generator=generator) for name, n in (("a.weight", ROWS), ("other.weight", 3))}


def changed(how: str) -> Checkpoint:
    """A first version, beside that of seed 0."""
    first = weights(0)
    match how:
        case "one element":
            first["a.weight"][3, 5] += 1
        case "another layer":
            first["other.weight"] += 1
        case "all":
            first = weights(1)
        case "the last row":
            first["a.weight"][-1] += 1
    return first


@pytest.mark.parametrize("how", ["nothing", "one element", "another layer", "all"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_derived_follows_every_push_wherever_it_is_kept(place: str, how: str) -> None:
    keep, kept = PLACES[place]
    host = ToyHost(Model(), fill, lambda model: keep(model, (model.a.weight * 2).clone()))
    applier = start(host, weights(0))
    for tensors in (changed(how), weights(2), weights(2), weights(3)):
        push(applier, tensors)
        assert all(torch.equal(host.model.get_parameter(name), tensor) for name, tensor in tensors.items())
        assert torch.equal(kept(host.model), 2 * tensors["a.weight"])
    assert any(reason.endswith("is derived from weights") for reason in applier.reload.values())


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the largest": lambda w: w.abs().max().clone(),
    "a number": lambda w: float(w.abs().max()),
    "a number within a list": lambda w: [[float(w.min())]],
    "an order": lambda w: w[0].argsort(),
    "one element of many": lambda w: torch.cat([torch.zeros(50_000), w[0, :1], torch.zeros(50_000)]),
    "signs": lambda w: w[:4, :4].sign().to(torch.int8),
    "text": lambda w: f"{float(w[0, 0]):.3f}",
    "a set": lambda w: {round(float(x), 2) for x in w[0]},
    "an object made anew": lambda w: SimpleNamespace(kept=w[0].clone()),
    "a dictionary by number": lambda w: {round(float(w[0, 0]), 3): 1},
    "half precision": lambda w: w[0, :3].to(torch.float16),
    "an array of objects": lambda w: np.array([float(w[0, 0])], dtype=object),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_derived_is_found_though_the_first_push_does_not_move_it(kind: str) -> None:
    host = ToyHost(Model(), fill, lambda model: setattr(model.beside.plain, "kept", KINDS[kind](model.a.weight)))
    applier = start(host, weights(0))
    push(applier, changed("the last row"))
    assert applier.reload["beside"].startswith("plain.kept")
    push(applier, weights(1))
    assert repr(host.model.beside.plain.kept) == repr(KINDS[kind](weights(1)["a.weight"]))


UNRELATED: dict[str, Callable[[Any], Any]] = {
    "a view of the weights": lambda m: setattr(m.beside, "kept", m.a.weight.t()),
    "the weights": lambda m: setattr(m.beside.plain, "kept", [m.a.weight]),
    "equal numbers in a new list": lambda m: setattr(m.beside, "kept", [1, 2.0, float("nan")]),
    "equal tensors in new memory": lambda m: setattr(m.beside, "kept", {"x": torch.arange(5)}),
    "the same object": lambda m: setattr(m.beside, "kept", m.beside.plain),
    "a method bound anew": lambda m: setattr(m.beside, "kept", m.a.forward),
    "a cycle": lambda m: setattr(m.beside.plain, "kept", [m.beside.plain, m]),
    "an empty tensor": lambda m: setattr(m.beside, "kept", torch.empty(0)),
    "a shape": lambda m: setattr(m.beside, "kept", m.a.weight.shape),
}


@pytest.mark.parametrize("kind", UNRELATED)
def test_what_does_not_follow_from_weights_keeps_no_layer_from_being_copied(kind: str) -> None:
    host = ToyHost(Model(), fill, UNRELATED[kind])
    applier = start(host, weights(0))
    push(applier, weights(1))
    assert (applier.direct, applier.reload) == ({"a", "other"}, {})


def test_what_two_layers_share_keeps_both_on_reload() -> None:
    """The session renews it for layers that it loads, and only then."""
    model, shared = bare(), Plain()
    model.a, model.b, model.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
    model.a.impl, model.b.impl = [shared], {"x": shared}
    host = ToyHost(model, fill, lambda model: setattr(shared, "kept", model.a.weight + model.b.weight))
    tensors = {f"{name}.weight": torch.randn(4, 4) for name in "abc"}
    applier = start(host, tensors)
    push(applier, tensors)
    assert (applier.direct, set(applier.reload)) == ({"c"}, {"a", "b"})


def test_a_look_leaves_out_what_generation_fills() -> None:
    class Host(ToyHost):
        def filled(self) -> list[torch.Tensor]:
            return [self.model.beside.kept]

    host = Host(Model(), fill, lambda model: setattr(model.beside, "kept", (model.a.weight * 2).clone()))
    applier = start(host, weights(0))
    push(applier, weights(1))
    assert applier.direct == {"a", "other"}


def test_a_look_is_not_disturbed_by_objects_that_cannot_be_looked_into() -> None:
    class Broken:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not now")

    model = Model()
    model.beside.kept = Broken()
    looks = [Holdings(model, list(model.parameters())) for _ in range(2)]
    assert looks[1].changed(looks[0]) == {}
