"""A reload session that leaves something else than the engine's initial load makes of the same bytes is found in the first push."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, ToyFresh, ToyHost, described
from torch import nn

from instep.errors import ApplyError
from instep.receiver.apply import Applier
from instep.receiver.arrival import Seen
from instep.receiver.trace import trace
from unit.receiver.test_rebuild import Passing

Finish = Callable[[Any], object]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6))
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.run: Any
        self.calls, self.seen = 0, None
        self.quant_method = SimpleNamespace()

    def computes(self) -> torch.Tensor:
        return self.run(torch.linspace(-1, 1, 18).view(3, 6))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(3))


def weights(seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layers.0.weight": (4, 6), "layers.1.weight": (4, 6), "norm.weight": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fill(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


def nothing(_: Model) -> None:
    pass


class Engine(ToyHost):
    """initial: ends an initial load. again: ends a reload session, where that is another thing. fresh_fill: loads one tensor initially."""

    def __init__(self, initial: Finish = nothing, again: Finish | None = None, **fills: Any) -> None:
        super().__init__(Model(), fills.get("fill", fill), initial)
        self.initial, self.fresh_fill = initial, fills.get("fresh_fill", self.fill)
        self.models = 0
        with super().reload():
            self.load(weights(0).items())
        self.finish = again or initial

    def fresh(self, fill: int) -> ToyFresh | None:
        self.models += 1
        return ToyFresh(Model(), self.fresh_fill, self.initial)

    def computes(self, layer: str) -> torch.Tensor:
        return self.model.get_submodule(layer).computes()

    def start(self) -> Applier:
        return Applier(self, trace(self, described(weights(0))))


def push(applier: Applier, seed: int, kind: type[Seen] = Seen) -> None:
    arrival = kind(weights(seed), described(weights(seed)))
    with torch.no_grad():
        applier.apply(arrival)
        arrival.prove(applier)


def each(change: Callable[[Any], object]) -> Finish:
    return lambda model: [change(layer) for layer in model.layers]


def first(change: Callable[[Any], object]) -> Finish:
    return lambda model: change(model.layers[0])


def second(change: Callable[[Any], object]) -> Finish:
    return lambda model: change(model.layers[1])


def both(*changes: Finish) -> Finish:
    return lambda model: [change(model) for change in changes]


def keep(layer: Any) -> None:
    """Derives from the weights, in every place at once."""
    layer.packed = layer.weight.t().contiguous()
    layer.scale = float(layer.weight.abs().max())
    layer.quant_method.scale = layer.weight.abs().max().clone()
    layer.deep = [{"x": layer.weight.sum(1)}]
    layer.apply_ = functools.partial(torch.matmul, layer.weight * 2)


def forgets(name: str) -> Finish:
    """A layer keeps what it had there, and makes all else anew."""

    def again(layer: Any) -> None:
        had = getattr(layer, name)
        keep(layer)
        setattr(layer, name, had)

    return both(first(keep), second(again))


def old_scale(layer: Any) -> None:
    had = layer.quant_method.scale
    keep(layer)
    layer.quant_method.scale = had


def turned(layer: Any) -> None:
    layer.weight.data = layer.weight.t().contiguous().view(4, 6)


def restored(layer: Any) -> None:
    """The weights that the engine was started with."""
    layer.weight.copy_(weights(0)["layers.1.weight"].t().contiguous().view(4, 6))


def packed_apart(layer: Any) -> None:
    """Into memory that only its address leads to."""
    made = layer.weight.t().contiguous()
    APART[made.data_ptr()] = made
    layer.handle = torch.tensor(made.data_ptr())
    layer.run = lambda x: x @ APART[int(layer.handle)]


APART: dict[int, torch.Tensor] = {}

WRONG: dict[str, tuple[Finish, Finish, str, str]] = {
    "forgets all that is derived": (each(keep), nothing, "layers.0", "apply_.args"),
    "forgets a tensor": (each(keep), forgets("packed"), "layers.1", "packed"),
    "forgets a number": (each(keep), forgets("scale"), "layers.1", "scale"),
    "forgets a tensor in a list": (each(keep), forgets("deep"), "layers.1", "deep[0]['x']"),
    "forgets a partial": (each(keep), forgets("apply_"), "layers.1", "apply_.args[0]"),
    "forgets a method's scale": (each(keep), both(first(keep), second(old_scale)), "layers.1", "quant_method.scale"),
    "drops what is derived": (each(keep), both(each(keep), second(lambda layer: delattr(layer, "packed"))), "layers.1", "packed"),
    "leaves the layout of a checkpoint": (each(turned), nothing, "layers.0", "weight"),
    "turns it twice": (each(turned), both(each(turned), second(turned)), "layers.1", "weight"),
    "puts old weights back": (each(turned), both(each(turned), second(restored)), "layers.1", "weight"),
    "empties a buffer": (nothing, second(lambda layer: layer.table.zero_()), "layers.1", "table"),
    "packs nothing anew": (each(packed_apart), nothing, "layers.0", "what it computes"),
    "packs something else": (each(packed_apart), second(lambda layer: layer.handle.copy_(layer.handle)), "layers.0", "what it computes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [Seen, Passing])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reload_is_found_in_the_first_push(wrong: str, kind: type[Seen]) -> None:
    initial, again, layer, what = WRONG[wrong]
    engine = Engine(initial, again)
    for _ in range(2):  # the engine is not mended by pushing again, and the error does not say so
        with pytest.raises(ApplyError, match=f"^{layer}: ") as caught:
            push(engine.start(), 1, kind)
        assert what in str(caught.value)
        assert "initial load of toy 1.2" in str(caught.value)
        assert "pushing again does not help" in str(caught.value)


RIGHT: dict[str, Finish] = {
    "nothing derived": nothing,
    "much derived": each(keep),
    "another layout": each(turned),
    "packed apart": each(packed_apart),
}


@pytest.mark.parametrize("kind", [Seen, Passing])
@pytest.mark.parametrize("right", RIGHT)
def test_a_right_reload_is_compared_once(right: str, kind: type[Seen]) -> None:
    engine = Engine(RIGHT[right])
    applier = engine.start()
    for seed in (1, 2, 3):
        push(applier, seed, kind)
        expected = Engine(RIGHT[right])
        with expected.reload():
            expected.load(weights(seed).items())
        assert all(torch.equal(one, other) for one, other in zip(engine.model.parameters(), expected.model.parameters(), strict=True))
        assert engine.models == 1
    assert applier.compared is not None
    assert applier.compared.layers >= {"layers.0", "layers.1", "norm"}
    assert applier.trusted() == {}


def test_what_has_changed_while_the_engine_ran_condemns_nothing() -> None:
    engine = Engine(each(keep))
    for layer in engine.model.layers:
        layer.calls, layer.seen, layer.cache = 7, torch.ones(3), {"kernel": object()}
        layer.quant_method.tuned = "block of 64"
    push(engine.start(), 1)
    assert engine.models == 3  # two more, to tell what follows from weights


def test_a_mark_that_every_initial_load_makes_anew_condemns_nothing() -> None:
    """vLLM gives the language model below a model that sees a configuration of its own, with the time at which it was made."""

    def mark(layer: Any) -> None:
        layer.config = SimpleNamespace(made=uuid.uuid4().hex, size=6)

    applier = Engine(initial=each(mark), again=nothing).start()
    push(applier, 1)
    push(applier, 2)


def test_memory_that_nothing_is_loaded_into_may_hold_anything() -> None:
    """Rows for which there are no weights; the initial load leaves in them what was there."""

    class Padded(Engine):
        def fresh(self, fill: int) -> ToyFresh | None:
            model = Model()
            for layer in model.layers:
                layer.rows = nn.Parameter(torch.full((6, 6), float(fill)))
            return ToyFresh(model, self.fresh_fill, self.initial)

    def pad(layer: Any) -> None:
        if not hasattr(layer, "rows"):
            layer.rows = nn.Parameter(torch.full((6, 6), 77.0), requires_grad=False)
        layer.rows.data[:4] = layer.weight

    push(Padded(each(pad)).start(), 1)
    with pytest.raises(ApplyError, match=r"layers\.1: rows is not what"):
        push(Padded(each(pad), both(each(pad), second(lambda layer: layer.rows.data[:1].zero_()))).start(), 1)


def test_what_a_loader_computes_is_proved() -> None:
    def load(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        model.get_parameter(name).copy_(-tensor.exp() if name == "layers.0.weight" else tensor)

    engine = Engine(fill=load)
    applier = engine.start()
    push(applier, 1)
    assert applier.reload == {"layers.0": "the loader computes its values on the way"}
    assert applier.trusted() == {}
    twice = Engine(again=first(lambda layer: layer.weight.mul_(2)), fill=load)
    with pytest.raises(ApplyError, match=r"layers\.0: weight is not what"):
        push(twice.start(), 1)


def test_a_layer_that_cannot_be_loaded_a_second_time_is_named() -> None:
    def refuse(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        raise NotImplementedError("no kernel")

    engine = Engine(each(keep), fresh_fill=refuse)
    applier = engine.start()
    push(applier, 1)
    why = "toy 1.2 could not load it a second time: NotImplementedError: no kernel"
    assert applier.trusted() == {"layers.0": why, "layers.1": why}  # the norm is read back, and nothing is derived from it


def test_a_layer_that_can_be_neither_read_nor_tried_is_named() -> None:
    class Mute(Engine):
        def computes(self, layer: str) -> torch.Tensor:
            raise RuntimeError(f"{layer} takes images")

    applier = Mute(each(packed_apart)).start()
    push(applier, 1)
    why = "its weights are kept where they cannot be read, or be tried: RuntimeError: layers.0 takes images"
    assert applier.trusted()["layers.0"] == why


def test_an_engine_that_makes_no_second_model_says_so() -> None:
    engine = Engine(each(keep))

    def refuse(_: int) -> ToyFresh:
        raise ValueError("duplicate layer")

    engine.fresh = refuse  # type: ignore[method-assign,assignment]
    applier = engine.start()
    push(applier, 1)
    assert set(applier.trusted()) == {"layers.0", "layers.1"}
    assert "toy 1.2 makes no second model to compare it with: ValueError: duplicate layer" in applier.trusted()["layers.0"]


def test_what_was_judged_is_compared_anew_when_it_is_withdrawn() -> None:
    engine = Engine(each(keep))
    push(engine.start(), 1)
    push(engine.start(), 2)
    assert engine.models == 2
