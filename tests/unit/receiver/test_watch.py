"""What a reload session shows of layers: the same judgement wherever the bytes come from. On a GPU sums stand for the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, ToyHost
from torch import nn

from instep import WeightSync
from instep.receiver.pull import Puller
from instep.receiver.stream import Scatter
from unit.receiver.test_stream import card
from unit.transport.test_ipc import ToyEngine

__all__ = ["card"]  # a fixture
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "ipc", "nccl"])


class Model(nn.Module):
    """Layers `a`, rows of whole words, and `b`, whose route cuts one."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("a", (4, 8)), ("b", (3,))):
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16))
            self.add_module(name, layer)


def weights(seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (4, 8), "b.weight": (3,)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def as_it_is(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


def scaled(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor * 2 if name == "a.weight" and not tensor.is_meta else tensor)


def in_float32(model: Any) -> None:
    model.a.weight.data = model.a.weight.data.float()


def in_float16(model: Any) -> None:
    model.a.weight.data = model.a.weight.data.half()


def in_float32_with_one_element_wrong(model: Any) -> None:
    """It rounds to what was brought."""
    in_float32(model)
    model.a.weight.data[3, 7] *= 1 + 2**-20


def by_columns(model: Any) -> None:
    model.a.weight.data = model.a.weight.data.t().contiguous().t()


def with_one_element_wrong(model: Any) -> None:
    model.a.weight.data[3, 7] = 7


def as_it_was(_: Any) -> None: ...


OTHERWISE = (in_float16, with_one_element_wrong, in_float32_with_one_element_wrong)


@TRANSPORTS
def test_layers_are_promoted_by_the_first_push_also_those_that_it_does_not_change(transport: Any) -> None:
    host, source = ToyHost(Model(), as_it_is), weights(1)
    as_it_is(host.model, "a.weight", source["a.weight"])
    with WeightSync(source, [ToyEngine(host)], transport=transport, timeout=20) as sync:
        first = sync.push("first").engines[0]
        assert (first.direct, first.reload) == (("a", "b"), {})
        for name, tensor in weights(2).items():
            source[name].copy_(tensor)
        assert sync.push("second").engines[0].direct == ("a", "b")
        assert torch.equal(host.model.get_parameter("a.weight"), source["a.weight"])


@TRANSPORTS
@pytest.mark.parametrize(("fill", "finish"), [(scaled, as_it_was), *((as_it_is, f) for f in OTHERWISE)])
def test_a_layer_that_is_stored_in_another_way_stays_on_reload(
    transport: Any, fill: Callable[..., None], finish: Callable[[Any], None]
) -> None:
    source = weights(1)
    with WeightSync(source, [ToyEngine(ToyHost(Model(), fill, finish))], transport=transport, timeout=20) as sync:
        engine = sync.push("first").engines[0]
    assert engine.direct == ("b",)
    assert engine.reload == {"a": "a.weight is not stored as the checkpoint has it"}


@TRANSPORTS
def test_a_layer_that_a_session_widens_is_copied_and_compared_widened(transport: Any) -> None:
    """As where one tensor goes to two parameters of different dtypes."""
    host, source = ToyHost(Model(), as_it_is, in_float32), weights(1)
    with WeightSync(source, [ToyEngine(host)], transport=transport, timeout=20) as sync:
        for version in "abc":
            source["a.weight"].mul_(-1.5)
            assert sync.push(version).engines[0].direct == ("a", "b")
            assert torch.equal(host.model.get_parameter("a.weight"), source["a.weight"].float())
    assert host.model.get_parameter("a.weight").dtype == torch.float32


@TRANSPORTS
def test_a_wider_engine_takes_widened_bytes(transport: Any) -> None:
    source, host = weights(1), ToyHost(Model().float(), as_it_is)
    with WeightSync(source, [ToyEngine(host)], transport=transport, timeout=20) as sync:
        for version in "abc":
            source["a.weight"].mul_(-1.5)
            receipt = sync.push(version)
            assert receipt.engines[0].direct == ("a", "b")
            assert all(torch.equal(host.model.get_parameter(name), tensor.float()) for name, tensor in source.items())
    assert receipt.nbytes == 2 * sum(tensor.nbytes for tensor in source.values())


def derives_from_b(model: Any) -> None:
    model.b.twice = 2 * model.b.weight


@TRANSPORTS
def test_a_layer_that_lies_in_another_order_is_compared_element_by_element(transport: Any) -> None:
    host, source = ToyHost(Model(), as_it_is, by_columns), weights(1)
    with WeightSync(source, [ToyEngine(host)], transport=transport, timeout=20) as sync:
        assert sync.push("first").engines[0].direct == ("a", "b")
        source["a.weight"].neg_()
        sync.push("second")
    assert host.model.a.weight.stride() == (1, 4)
    assert torch.equal(host.model.a.weight, source["a.weight"])


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_what_stays_on_reload_is_worked_out_once(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read back in every push."""
    source, made = weights(1), list[type]()
    host = ToyHost(Model(), as_it_is, derives_from_b)
    for kind in (Scatter, Puller):

        def noted(self: Any, *given: Any, init: Callable[..., None] = kind.__init__) -> None:
            made.append(type(self))
            init(self, *given)

        monkeypatch.setattr(kind, "__init__", noted)
    with WeightSync(source, [ToyEngine(host)], transport=transport, timeout=20) as sync:
        for version in "abcd":
            source["a.weight"].neg_()
            receipt = sync.push(version)
            if version == "b":
                made.clear()
    assert receipt.engines[0].reload == {"b": "twice is derived from weights"}
    assert made == []
