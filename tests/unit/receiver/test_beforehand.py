"""Which layers can do without a reload session is found before the pause, on models in scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toys import ToyFresh, described
from torch import nn

from instep.receiver import Fill
from instep.receiver.apply import Applier
from unit.receiver.test_initial import Engine, Model, first, keep, nothing, push, turned, weights

ALL = {"layers.0", "layers.1", "norm"}


class Beforehand(Engine):
    decides_beforehand = True


def decided(engine: Engine) -> Applier:
    """The applier of a first push, before its commit. Nothing live was written on the way."""
    engine.sessions = 0
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    applier = engine.start()
    while not applier.decide(described(weights(0))):
        pass
    assert all(torch.equal(before[name], value) for name, value in engine.model.state_dict().items())
    assert not engine.sessions
    return applier


def holds(engine: Engine, seed: int) -> bool:
    return all(torch.equal(engine.model.get_parameter(name), tensor) for name, tensor in weights(seed).items())


def test_plain_layers_are_copied_from_the_first_push_on() -> None:
    engine = Beforehand()
    applier = decided(engine)
    assert applier.direct == ALL
    assert not applier.reload
    assert applier.told()["compared"] == 3
    for seed in (1, 2, 1):
        push(applier, seed)
        assert holds(engine, seed)
    assert not engine.sessions


def test_the_model_is_looked_at_in_parts() -> None:
    engine = Beforehand()
    applier = engine.start()
    answers: list[bool] = []
    while not answers or not answers[-1]:
        answers.append(applier.decide(described(weights(0))))
    assert answers == [False, False, False, True]  # two models are made, one unit is looked at
    assert applier.decide(described(weights(0)))


def test_a_host_that_decides_in_its_sessions_makes_no_model() -> None:
    engine = Engine()
    applier = engine.start()
    assert applier.decide(described(weights(0)))
    assert not engine.models
    assert applier.undecided


def test_a_layer_that_derives_something_stays_on_reload_and_the_others_do_not() -> None:
    engine = Beforehand(first(keep))
    applier = decided(engine)
    assert (applier.direct, {*applier.reload}) == ({"layers.1", "norm"}, {"layers.0"})
    push(applier, 1)
    assert engine.sessions == 2  # one of them with made-up weights
    assert torch.equal(engine.model.layers[0].packed, weights(1)["layers.0.weight"].t())
    assert holds(engine, 1)


def test_a_layer_with_a_layout_of_its_own_stays_on_reload() -> None:
    assert decided(Beforehand(first(turned))).reload.keys() == {"layers.0"}


def total(model: Any) -> None:
    model.total = sum(layer.weight.sum() for layer in model.layers)


def test_nothing_is_decided_where_a_module_without_weights_follows_from_some() -> None:
    engine = Beforehand(total)
    applier = decided(engine)
    assert applier.reload.keys() == ALL
    push(applier, 1)
    assert torch.equal(engine.model.total, sum((layer.weight.sum() for layer in engine.model.layers), torch.tensor(0.0)))


def borrows(model: Any) -> None:
    """One layer keeps what another one's weights make."""
    model.layers[0].borrowed = model.layers[1].weight * 2


def test_layers_are_decided_together_where_one_follows_from_weights_of_another() -> None:
    engine = Beforehand(borrows)
    assert decided(engine).reload.keys() == ALL
    applier = decided(engine)
    for seed in (1, 2):
        push(applier, seed)
        assert torch.equal(engine.model.layers[0].borrowed, weights(seed)["layers.1.weight"] * 2)


def marked(model: Any) -> None:
    model.layers[0].mark = torch.zeros(2)


@pytest.mark.parametrize(("filled", "reload"), [(False, ALL), (True, set())])
def test_a_tensor_that_has_changed_may_follow_from_anything_unless_generation_fills_it(filled: bool, reload: set[str]) -> None:
    engine: Any = Beforehand(marked)
    engine.model.layers[0].mark = torch.ones(2)
    engine.filled = lambda: [engine.model.layers[0].mark] if filled else []
    assert decided(engine).reload.keys() == reload


def other_buffer(model: Any) -> None:
    model.layers[0].table.add_(1)


def own_copy(model: Any) -> None:
    """What the kernel computes with is not the parameter's memory any more."""
    model.layers[0].kernel = model.layers[0].weight.detach().clone()


@pytest.mark.parametrize("change", [other_buffer, own_copy])
def test_a_live_layer_that_no_initial_load_leaves_stays_on_reload(change: Callable[[Any], None]) -> None:
    engine = Beforehand(first(lambda layer: setattr(layer, "kernel", layer.weight.detach())))
    change(engine.model)
    assert "layers.0" in decided(engine).reload


def test_what_has_changed_since_the_start_and_follows_from_no_weights_does_not_matter() -> None:
    engine = Beforehand()
    engine.model.layers[0].calls = 7
    assert decided(engine).direct == ALL


class Failing(Beforehand):
    at = 1

    def fresh(self, fill: int) -> ToyFresh | None:
        if self.models + 1 == self.at:
            raise RuntimeError("no room")
        return super().fresh(fill)


@pytest.mark.parametrize("at", [1, 2])
def test_an_engine_without_room_for_second_models_decides_in_its_first_commit(at: int) -> None:
    engine = Failing()
    engine.at = at
    applier = decided(engine)
    assert applier.reload.keys() == ALL
    engine.at = 0
    push(applier, 1)
    assert holds(engine, 1)


def test_a_load_that_fails_in_scratch_memory_decides_nothing() -> None:
    def refuse(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        raise RuntimeError("not twice")

    assert decided(Beforehand(fresh_fill=refuse)).reload.keys() == ALL


def pack(layer: Any) -> None:
    """Keeps the weight packed, and leaves an empty one."""
    layer.packed = layer.weight.detach().t().contiguous()
    layer.run = lambda probe, packed=layer.packed: probe @ packed
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def rebuild(layer: Any, fill: Fill) -> None:
    layer.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
    fill({"weight": layer.weight})
    pack(layer)


class PackedFresh(ToyFresh):
    forgets = False

    def rebuild(self, layer: str, fill: Fill) -> None:
        if not self.forgets:
            rebuild(self.model.get_submodule(layer), fill)


class Packed(Beforehand):
    """Its first layer is packed. forgets: a rebuild in scratch memory does nothing."""

    forgets = False

    def __init__(self) -> None:
        super().__init__(first(pack), fill=self.write, fresh_fill=self.write)

    @staticmethod
    def write(model: Any, name: str, tensor: torch.Tensor) -> None:
        layer = model.get_submodule(name.rpartition(".")[0])
        if not layer.weight.numel():
            layer.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        layer.weight.copy_(tensor)

    def fresh(self, fill: int) -> ToyFresh | None:
        made = PackedFresh(Model(), self.write, self.initial)
        made.forgets = self.forgets
        return made

    def rebuilds(self, layer: str) -> bool:
        return layer == "layers.0"

    def rebuild(self, layer: str, fill: Fill) -> None:
        rebuild(self.model.get_submodule(layer), fill)

    def refresh(self) -> None:
        nothing(self.model)


def packed_applier(*, forgets: bool) -> tuple[Packed, Applier]:
    engine = Packed()
    engine.forgets = forgets
    layout = engine.model.layers[0].weight
    engine.model.layers[0].weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)  # the layout that its loader expects
    applier = engine.start()
    engine.model.layers[0].weight = layout
    while not applier.decide(described(weights(0))):
        pass
    return engine, applier


def test_a_packed_layer_is_rebuilt_from_the_first_push_on() -> None:
    engine, applier = packed_applier(forgets=False)
    assert (applier.direct, applier.rebuild, applier.reload) == ({"layers.1", "norm"}, {"layers.0"}, {})
    engine.sessions = 0
    push(applier, 1)
    assert torch.equal(engine.model.layers[0].packed, weights(1)["layers.0.weight"].t())
    assert not engine.sessions
    assert applier.stays()


def test_a_packed_layer_that_a_rebuild_leaves_as_it_was_stays_on_reload() -> None:
    _, applier = packed_applier(forgets=True)
    assert applier.reload.keys() == {"layers.0"}
    assert applier.direct == {"layers.1", "norm"}
