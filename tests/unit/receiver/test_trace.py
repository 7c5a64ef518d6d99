"""Routes against the loader that they were recorded from: what they would copy is what the loader writes, or the layer says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, ToyHost, bits, described
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from instep.errors import ConfigError, PlanError
from instep.plan.region import covered, view
from instep.plan.routes import prove
from instep.protocol import Region, Route, TensorMeta, WorkerPlan
from instep.receiver.trace import trace

Loader = Callable[[nn.Parameter, torch.Tensor], object]


class Layer(nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 7.0, dtype=dtype))


def host_of(loader: Loader, *shape: int, dtype: torch.dtype = torch.float32) -> ToyHost:
    """A model with one layer, `layer`, that `loader` fills from whatever is offered."""
    model = nn.Module()
    model.layer = Layer(*shape, dtype=dtype)
    return ToyHost(model, lambda model, name, tensor: loader(model.layer.weight, tensor))


def replayed(plan: WorkerPlan, tensors: Checkpoint, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What the routes alone would write."""
    target = torch.zeros(shape, dtype=dtype)
    for route in plan.routes:
        if route.tensor is not None and route.source is not None:
            view(target, route.target).copy_(view(tensors[route.tensor], route.source))
    return target


def check(loader: Loader, source: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> WorkerPlan:
    """Traces `loader` over `source`; unless the layer is left to the reload session, its routes must do what the loader does."""
    host = host_of(loader, *shape, dtype=dtype)
    plan = trace(host, described({"w": source}))
    assert host.model.layer.weight.unique().tolist() == [7.0]
    if not plan.reload_only:
        host.model.layer.weight.zero_()
        host.load([("w", source)])
        assert torch.equal(bits(replayed(plan, {"w": source}, shape, dtype)), bits(host.model.layer.weight))
    return plan


X = torch.arange(24.0).reshape(4, 6)


def by_head(w: torch.Tensor, x: torch.Tensor) -> None:
    """As loaders that put q, k and v in order, and then load each by itself."""
    for part in range(2):
        w.narrow(0, 2 * part, 2).copy_(x.narrow(0, 2 * part, 2))


COPIES: dict[str, tuple[Loader, tuple[int, ...]]] = {
    "whole": (lambda w, x: w.copy_(x), (4, 6)),
    "through .data": (lambda w, x: w.data.copy_(x), (4, 6)),
    "rows of a fused layer": (lambda w, x: w.narrow(0, 2, 4).copy_(x), (8, 6)),
    "a tensor-parallel slice": (lambda w, x: w.copy_(x.narrow(1, 3, 3)), (4, 3)),
    "transposed": (lambda w, x: w.copy_(x.t()), (6, 4)),
    "into a transposed parameter": (lambda w, x: w.t().copy_(x), (6, 4)),
    "transposed and made contiguous": (lambda w, x: w.copy_(x.t().contiguous()), (6, 4)),
    "made contiguous": (lambda w, x: w.copy_(x[:, ::2].contiguous()), (4, 3)),
    "another dtype": (lambda w, x: w.copy_(x.to(torch.float64)), (4, 6)),
    "a slice of a cast": (lambda w, x: w.copy_(x.to(torch.float64)[1:3]), (2, 6)),
    "cloned": (lambda w, x: w.copy_(x.clone().view(2, 12)), (2, 12)),
    "in chunks": (lambda w, x: [w[half].copy_(part) for half, part in enumerate(x.chunk(2))], (2, 2, 6)),
    "one expert": (lambda w, x: w[1].copy_(x.unsqueeze(0)[0]), (2, 4, 6)),
    "every second column": (lambda w, x: w[:, ::2].copy_(x), (4, 12)),
    "split heads": (lambda w, x: w.copy_(x.unflatten(0, (2, 2)).flatten(0, 1)), (4, 6)),
    "repeated rows": (lambda w, x: w.copy_(x[0]), (4, 6)),
    "repeated by hand": (lambda w, x: w.copy_(x[:1].expand(4, 6)), (4, 6)),
    "a scalar": (lambda w, x: w[0, 0].fill_(x[2, 3].item()), (1, 1)),
    "heads of a fused layer": (lambda w, x: by_head(w, x.view(2, 2, 6).transpose(0, 1).reshape(4, 6)), (4, 6)),
    "in another shape": (lambda w, x: w.copy_(x.t().reshape(4, 6)), (4, 6)),
    "two at once": (lambda w, x: torch._foreach_copy_([w[0], w[1]], [x[:2], x[2:]]), (2, 2, 6)),
    "by way of the host": (lambda w, x: w.copy_(x.cpu()), (4, 6)),
    "by way of a device": (lambda w, x: w.copy_(x.to(device="cpu", dtype=torch.float64)), (4, 6)),
}


@pytest.mark.parametrize(("loader", "shape"), COPIES.values(), ids=COPIES)
def test_copies_become_routes(loader: Loader, shape: tuple[int, ...]) -> None:
    plan = check(loader, X, *shape)
    assert plan.reload_only == {}
    assert {route.tensor for route in plan.routes} == {"w"}


def with_row(x: torch.Tensor) -> torch.Tensor:
    x[1].add_(1)
    return x


OPAQUE: dict[str, tuple[Loader, tuple[int, ...], str]] = {
    "arithmetic": (lambda w, x: w.copy_(x + 1), (4, 6), "computes its values on the way"),
    "concatenation": (lambda w, x: w.copy_(torch.cat([x, x])), (8, 6), "computes its values on the way"),
    "another order": (lambda w, x: w.copy_(x[torch.tensor([1, 0, 3, 2])]), (4, 6), "computes its values on the way"),
    "a detour": (lambda w, x: w.copy_(torch.empty_like(x).copy_(x)), (4, 6), "computes its values on the way"),
    "in place": (lambda w, x: w.copy_(x).mul_(2), (4, 6), "updates it in place (mul_"),
    "added": (lambda w, x: w.add_(x), (4, 6), "updates it in place (add_"),
    "as an operation's out": (lambda w, x: torch.add(x, 1, out=w.data), (4, 6), "updates it in place (add.out"),
    "a list in place": (lambda w, x: torch._foreach_add_([w], [x]), (4, 6), "updates it in place (_foreach_add_"),
    "a copy that was changed": (lambda w, x: w.copy_(x.clone().mul_(2)), (4, 6), "computes its values on the way"),
    "a copy of which a row was changed": (lambda w, x: w.copy_(with_row(x.clone())), (4, 6), "computes its values on the way"),
    "exponentials, after the copy": (lambda w, x: (w.copy_(x), w.copy_(-torch.exp(w))), (4, 6), "computes its values on the way"),
    "filled from one element": (lambda w, x: w.fill_(x[0, 1].item()), (4, 6), "fills it from a scalar"),
    "filled from a computed scalar": (lambda w, x: w.fill_((x[0, 1] + 1).item()), (4, 6), "fills it from a scalar"),
    "a computed scalar in a row": (lambda w, x: (w[1:].copy_(x), w[0, :1].fill_(x.mean().item())), (5, 6), "fills it from a scalar"),
}


@pytest.mark.parametrize(("loader", "shape", "reason"), OPAQUE.values(), ids=OPAQUE)
def test_what_is_no_copy_is_left_to_the_reload_session(loader: Loader, shape: tuple[int, ...], reason: str) -> None:
    plan = check(loader, X, *shape)
    assert list(plan.reload_only) == ["layer"]
    assert reason in plan.reload_only["layer"]


def test_padding_is_a_constant() -> None:
    def padded(w: nn.Parameter, x: torch.Tensor) -> None:
        w[:4].copy_(x)
        w[4:].fill_(0)

    plan = check(padded, X, 6, 6)
    assert plan.reload_only == {}
    assert plan.routes[1] == Route(None, None, "layer.weight", Region(24, (2, 6), (6, 1)))
    assert prove("engine", described({"w": X}), [plan], cast=False).kept() == {}


def test_what_a_loader_writes_into_a_checkpoint_tensor_is_known() -> None:
    """Loaders are given copies of such tensors: the bytes may be the trainer's own."""
    plan = trace(host_of(lambda w, x: w.copy_(x.mul_(2)), 4, 6), described({"w": X}))
    assert plan.overwritten == ["w"]
    assert "computes its values on the way" in plan.reload_only["layer"]


def test_a_checkpoint_tensor_filled_with_zeros_is_a_constant() -> None:
    """As the ranks of a fused layer do that leave a bias to the first."""
    plan = trace(host_of(lambda w, x: w.copy_(x.zero_()), 4, 6), described({"w": X}))
    assert plan.routes == [Route(None, None, "layer.weight", Region(0, (4, 6), (6, 1)))]
    assert plan.overwritten == ["w"]
    plan = trace(host_of(lambda w, x: w.copy_(x.zero_().add_(1)), 4, 6), described({"w": X}))
    assert plan.routes == []
    assert plan.opaque == ["layer.weight"]


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda x: x.transpose(0, -1),
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "cast": lambda x: x.to(torch.float64),
    "narrow": lambda x: x.narrow(0, x.shape[0] // 2, (x.shape[0] + 1) // 2),
    "step": lambda x: x[..., ::2],
    "reshape": lambda x: x.reshape(-1),
    "split": lambda x: x.unflatten(0, (-1, 2)) if x.shape[0] % 2 == 0 else x,
    "unsqueeze": lambda x: x.unsqueeze(0),
    "rows": lambda x: x[1:] if x.shape[0] > 2 else x,
    "expand": lambda x: x[:1].expand(2, *x.shape[1:]),
    "channels last": lambda x: x.reshape(1, 2, 2, -1).contiguous(memory_format=torch.channels_last) if x.numel() % 4 == 0 else x,
    "flip": lambda x: x.flip(0),
}


@settings(max_examples=200)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=5))
def test_any_way_to_a_parameter(steps: list[str]) -> None:
    """Whatever a loader does on the way: right routes, or none."""

    def on_the_way(tensor: torch.Tensor) -> torch.Tensor:
        for step in steps:
            tensor = STEPS[step](tensor)
        return tensor

    check(lambda w, x: w.copy_(on_the_way(x)), X, *on_the_way(X).shape)


def refuse(w: nn.Parameter, x: torch.Tensor) -> None:
    raise KeyError("no such weight")


def config_error(w: nn.Parameter, x: torch.Tensor) -> None:
    raise ConfigError("told so")


def test_a_loader_that_refuses_names_tensor_and_shape() -> None:
    """Invariant 4: before a byte moves, and the message names the tensor."""
    with pytest.raises(PlanError, match=r"loader refuses w \[4, 6\]: KeyError: 'no such weight'") as caught:
        trace(host_of(refuse, 4, 6), described({"w": X}))
    assert caught.value.tensor == "w"


def test_a_shape_that_does_not_fit_names_tensor_and_shape() -> None:
    with pytest.raises(PlanError, match=r"loader refuses w \[4, 6\]"):
        trace(host_of(lambda w, x: w.copy_(x), 4, 5), described({"w": X}))


def test_a_loader_that_leaves_a_tensor_out_is_found_out() -> None:
    def only_first(model: Any, name: str, tensor: torch.Tensor) -> None:
        if name == "w":
            model.layer.weight.copy_(tensor)

    host = host_of(lambda w, x: None, 4, 6)
    host.fill = only_first
    tensors = described({"w": X, "skipped": X})
    with pytest.raises(PlanError, match="engine: the engine's loader has no place for skipped"):
        prove("engine", tensors, [trace(host, tensors)], cast=False)


@pytest.mark.parametrize("loader", [lambda w, x: w.copy_(x), lambda w, x: w.mul_(2), refuse, config_error])
def test_live_tensors_are_the_same_afterwards(loader: Loader) -> None:
    """Invariants 1 and 8: tracing writes nothing and moves nothing."""
    host = host_of(loader, 4, 6)
    layer = host.model.layer
    before, address, values = layer.weight, layer.weight.data_ptr(), layer.weight.clone()
    try:
        trace(host, described({"w": X}))
    except (PlanError, ConfigError):
        assert loader in (refuse, config_error)
    assert layer.weight is before
    assert layer.weight.data_ptr() == address
    assert torch.equal(layer.weight, values)
    assert isinstance(layer.weight, nn.Parameter)


class Tied(nn.Module):
    """Embedding and head with one tensor between them, or with one each."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = Layer(4, 6), Layer(4, 6)
        if tied:
            self.head.weight = self.embed.weight


def by_name(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


EMBED, HEAD = TensorMeta("embed.weight", "float32", (4, 6)), TensorMeta("head.weight", "float32", (4, 6), alias_of="embed.weight")


@pytest.mark.parametrize("tensors", [[EMBED], [EMBED, HEAD], [HEAD, EMBED]])
def test_a_tied_engine_reads_tied_weights_once(tensors: list[TensorMeta]) -> None:
    plan = trace(ToyHost(Tied(tied=True), by_name), tensors)
    assert [(route.tensor, route.param) for route in plan.routes] == [("embed.weight", "embed.weight")]
    assert prove("engine", tensors, [plan], cast=False).kept() == {"head.weight": "the same tensor as embed.weight"}


@pytest.mark.parametrize("spare", [0, 6])
def test_an_untied_engine_reads_tied_weights_twice(spare: int) -> None:
    """... also where a few padded rows of its head need not be written."""
    host = ToyHost(Tied(tied=False), by_name)
    host.spare = lambda parameter: (spare, "padding" if spare else None)  # type: ignore[method-assign]
    plan = trace(host, [EMBED, HEAD])
    assert {(route.tensor, route.param) for route in plan.routes} == {("embed.weight",) * 2, ("head.weight",) * 2}
    with pytest.raises(PlanError, match=r"nothing in the source fills head.weight \[4, 6\]"):
        prove("engine", [EMBED], [trace(host, [EMBED])], cast=False)


READ: dict[str, tuple[Loader, tuple[int, ...], int]] = {
    "all": (lambda w, x: w.copy_(x + 1), (4, 6), 24),
    "half": (lambda w, x: w.copy_(x[:2] * 2), (2, 6), 12),
    "a part of a copy": (lambda w, x: w.copy_(x.clone()[1:] + 1), (3, 6), 18),
    "in two steps": (lambda w, x: w.copy_((x[:, :3] + x[:, 3:]).t() @ x), (3, 6), 24),
    "through a tensor of its own": (lambda w, x: w.copy_(torch.empty(2, 6, device=x.device).copy_(x[2:])), (2, 6), 12),
    "added in place": (lambda w, x: w.add_(x[0]), (6,), 6),
    "a number": (lambda w, x: w.fill_((x[0] + 1).sum().item()), (4, 6), 6),
    "from a list": (lambda w, x: w.copy_(torch.stack([x[0], x[1]])), (2, 6), 12),
    "by a choice": (lambda w, x: w.copy_(torch.where(x > 0, x, -x)), (4, 6), 24),
    "looked at, not used": (lambda w, x: (x.isnan().any().item(), w.copy_(x[:2] + 1)), (2, 6), 12),
}


@pytest.mark.parametrize(("loader", "shape", "elements"), READ.values(), ids=READ)
def test_what_a_parameter_is_computed_from_is_known(loader: Loader, shape: tuple[int, ...], elements: int) -> None:
    plan = trace(host_of(loader, *shape), described({"w": X}))
    assert plan.opaque == ["layer.weight"]
    assert covered(plan.computed["w"], X.shape) == elements
    assert plan.feeds == {"w": ["layer"]}


def test_a_scalar_tensor_that_a_loader_fills_with_is_no_constant() -> None:
    plan = trace(host_of(lambda w, x: w.fill_(x[1, 2]), 1), described({"w": X}))
    assert plan.routes == [Route("w", Region(8, (1,), (0,)), "layer.weight", Region(0, (1,), (1,)))]
    plan = trace(host_of(lambda w, x: w.fill_(x[1, 2]), 4, 6), described({"w": X}))
    assert "layer.weight" in plan.opaque
