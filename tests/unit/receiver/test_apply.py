"""Which layer may be copied straight into live storage, and what that must never leave stale.

Invariant 5: derived state is rebuilt or proved untouched. Invariant 8: addresses stay.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, ToyHost, bits, push, start
from torch import nn

from instep.errors import DigestMismatch
from instep.receiver.arrival import Seen


class Layer(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape))


class Model(nn.Module):
    """Two plain layers, `a` and `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(4, 6), Layer(3)


def fill(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


def weights(seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(4, 6, generator=generator), "b.weight": torch.randn(3, generator=generator)}


def holds(host: ToyHost, tensors: Checkpoint) -> bool:
    return all(torch.equal(bits(host.model.get_parameter(name)), bits(tensor)) for name, tensor in tensors.items())


def test_plain_layers_are_promoted_by_the_first_push() -> None:
    host = ToyHost(Model(), fill)
    applier = start(host, weights(0))
    push(applier, weights(1))
    assert (applier.direct, applier.reload) == ({"a", "b"}, {})
    sessions = host.sessions
    push(applier, weights(2))
    assert holds(host, weights(2))
    assert host.sessions == sessions  # copied straight
    assert Seen(weights(2), []).prove(applier).tensors == 2


def test_a_push_of_the_weights_that_are_there_promotes_too() -> None:
    host = ToyHost(Model(), fill)
    applier = start(host, weights(0))
    push(applier, weights(0))
    assert holds(host, weights(0))
    assert applier.direct == {"a", "b"}


def test_only_layers_on_reload_are_loaded_by_the_session() -> None:
    host = ToyHost(Model(), fill, lambda model: setattr(model.a, "packed", model.a.weight.sum(1)))
    applier = start(host, weights(0))
    push(applier, weights(1))
    push(applier, weights(2))
    assert host.loaded == ["a.weight"]
    assert holds(host, weights(2))


def test_a_loader_that_takes_no_other_weights_gets_the_right_ones_and_keeps_its_session() -> None:
    def choosy(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_meta and tensor.max() > 10:
            raise ValueError("weights are small")
        fill(model, name, tensor)

    host = ToyHost(Model(), choosy)
    applier = start(host, weights(0))
    for seed in (1, 2):
        push(applier, weights(seed))
        assert holds(host, weights(seed))
    assert applier.direct == set()
    assert applier.reload["b"] == "the engine's loader did not take other weights: ValueError: weights are small"
    assert applier.unproved == {}  # each push has read them back


def test_a_layer_that_other_weights_do_not_reach_is_not_promoted() -> None:
    """A session that writes nothing would leave what is derived stale too."""
    host = ToyHost(Model(), lambda model, name, tensor: fill(model, name, tensor) if name == "b.weight" or tensor.is_meta else None)
    fill(host.model, "a.weight", weights(0)["a.weight"])
    applier = start(host, weights(0))
    push(applier, weights(0))
    assert applier.direct == {"b"}
    assert applier.reload == {"a": "the reload session left its weights as they were when it was given different ones"}
    with pytest.raises(DigestMismatch, match=r"a\.weight does not hold the bytes of a\.weight after the engine's reload session"):
        push(applier, weights(1))


def test_integers_are_not_judged_by_zeros_that_they_have_already() -> None:
    host = ToyHost(Model(), fill)
    host.model.b.weight = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    tensors = weights(0) | {"b.weight": torch.zeros(3, dtype=torch.int64)}
    applier = start(host, tensors)
    push(applier, tensors)
    assert applier.direct == {"a"}


class Tied(nn.Module):
    """An embedding and a head that keeps a packed copy of the tensor between them, as vLLM on a CPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Layer(4, 6), Layer(4, 6)
        self.head.weight = self.embed.weight


def pack_head(model: Any) -> None:
    model.head.packed = model.head.weight.t().contiguous()


def test_the_partner_of_a_tied_layer_is_rebuilt() -> None:
    host = ToyHost(Tied(), fill, pack_head)
    applier = start(host, {"embed.weight": torch.zeros(4, 6)})
    for value in (1.0, 2.0, 2.0, 3.0):
        push(applier, {"embed.weight": torch.full((4, 6), value)})
        assert host.model.head.packed.unique().tolist() == [value]
    assert "packed is derived from weights" in applier.reload["head"]


class Transposed(nn.Module):
    """Loads checkpoint layout, then stores the transpose: what a kernel wants."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Layer(6, 4)


def fill_transposed(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    target = model.get_parameter(name)
    target.copy_(tensor.t() * 1 if not target.is_meta else tensor.t())


def fill_scaled(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    target = model.get_parameter(name)
    target.copy_(tensor * 2 if not target.is_meta else tensor)


def test_a_layer_stored_in_another_way_stays_on_reload() -> None:
    """The routes say where bytes go while loading; a layer whose live bytes are others was rewritten afterwards."""
    host = ToyHost(Model(), fill_scaled)
    applier = start(host, weights(0))
    for seed in (1, 2, 3):
        push(applier, weights(seed))
        assert torch.equal(host.model.a.weight, 2 * weights(seed)["a.weight"])
    assert applier.direct == set()
    assert applier.reload["a"] == "a.weight is not stored as the checkpoint has it"


def test_a_transposed_route_is_copied_right() -> None:
    host = ToyHost(Transposed(), fill_transposed)
    tensors = [{"a.weight": torch.randn(4, 6)} for _ in range(3)]
    applier = start(host, tensors[0])
    for value in tensors[1:]:
        push(applier, value)
        assert torch.equal(host.model.a.weight, value["a.weight"].t())
    assert applier.direct == {"a"}


def test_a_layer_that_is_computed_on_the_way_gets_all_tensors_each_time() -> None:
    def add(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        model.get_parameter(name).copy_(tensor + 1)

    host = ToyHost(Model(), lambda model, name, tensor: (add if name.startswith("a") else fill)(model, name, tensor))
    applier = start(host, weights(0))
    for seed in (1, 2, 3):
        push(applier, weights(seed))
        assert torch.equal(host.model.a.weight, weights(seed)["a.weight"] + 1)
        assert torch.equal(host.model.b.weight, weights(seed)["b.weight"])
    assert "computes its values on the way" in applier.reload["a"]


def test_addresses_stay_over_pushes() -> None:
    host = ToyHost(Model(), fill)
    applier = start(host, weights(0))
    addresses = {name: (parameter.data_ptr(), id(parameter)) for name, parameter in host.model.named_parameters()}
    for seed in (0, 1, 2):
        push(applier, weights(seed))
        assert {name: (parameter.data_ptr(), id(parameter)) for name, parameter in host.model.named_parameters()} == addresses


@pytest.mark.parametrize("value", [float("nan"), -0.0], ids=["nan", "negative zero"])
def test_bits_are_compared_not_numbers(value: float) -> None:
    host = ToyHost(Model(), fill)
    applier = start(host, weights(0))
    special = weights(1)
    special["a.weight"][0, 0] = value
    push(applier, special)
    assert applier.direct == {"a", "b"}
    other = special | {"a.weight": special["a.weight"].clone()}
    other["a.weight"][0, 0] = 0.0
    with pytest.raises(DigestMismatch, match=r"a\.weight does not hold the bytes of a\.weight") as caught:
        Seen(other, []).prove(applier)
    assert caught.value.tensor == "a.weight"


def test_a_write_beside_the_push_is_seen_when_it_is_read_back() -> None:
    host = ToyHost(Model(), fill)
    applier = start(host, weights(0))
    push(applier, weights(1))
    host.model.b.weight[1] += 1e-3
    with pytest.raises(DigestMismatch, match=r"b\.weight"):
        Seen(weights(1), []).prove(applier)
