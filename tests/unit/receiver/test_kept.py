"""What a worker has proved of its layers stays, whoever pushes, until the engine is another one or a commit has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, ToyHost
from torch import nn

from instep import MemoryEngine, WeightSync
from instep.errors import SyncError
from unit.transport.test_ipc import ToyEngine

pytestmark = pytest.mark.usefixtures("segments")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(3, 5, bias=False)
        vars(self.a)["method"] = SimpleNamespace(kind="plain")


def fill(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


def weights(seed: int, **more: torch.Tensor) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(4, 6, generator=generator), "b.weight": torch.randn(5, 3, generator=generator), **more}


@pytest.fixture
def host() -> ToyHost:
    return ToyHost(Model(), fill)


def push(engine: Any, version: str, tensors: Checkpoint) -> Any:
    """By a trainer that ends then, as `instep push` does."""
    with WeightSync(tensors, [engine], transport="shm") as sync:
        return sync.push(version).engines[0]


def test_the_next_trainer_finds_layers_promoted(host: ToyHost) -> None:
    engine = ToyEngine(host)
    push(engine, "one", weights(1))
    sessions = host.sessions
    receipt = push(engine, "two", weights(2))
    assert (receipt.direct, receipt.reload) == (("a", "b"), {})
    assert host.sessions == sessions
    assert torch.equal(host.model.a.weight, weights(2)["a.weight"])


def test_a_trainer_of_another_list_does_not_lose_what_was_proved_of_the_first(host: ToyHost) -> None:
    engine = ToyEngine(host)
    push(engine, "one", weights(1))
    turned = dict(reversed(weights(2).items()))
    push(engine, "two", turned)
    sessions = host.sessions
    push(engine, "three", weights(3))
    push(engine, "four", turned)
    assert host.sessions == sessions


def replaced_module(model: Any) -> None:
    model.a = nn.Linear(6, 4, bias=False).requires_grad_(False)


def replaced_parameter(model: Any) -> None:
    model.a.weight = nn.Parameter(model.a.weight.clone(), requires_grad=False)


def replaced_object(model: Any) -> None:
    model.a.method = SimpleNamespace(kind="packed")


def new_object(model: Any) -> None:
    model.b.method = SimpleNamespace(kind="packed")


def another_shape(model: Any) -> None:
    model.extra = nn.Linear(2, 2, bias=False).requires_grad_(False)


@pytest.mark.parametrize("change", [replaced_module, replaced_parameter, replaced_object, new_object, another_shape])
def test_what_changes_in_the_engine_withdraws_it(host: ToyHost, change: Any) -> None:
    engine = ToyEngine(host)
    extra = {"extra.weight": torch.randn(2, 2)} if change is another_shape else {}
    push(engine, "one", weights(1))
    change(host.model)
    sessions = host.sessions
    push(engine, "two", weights(2, **extra))
    assert host.sessions > sessions
    assert torch.equal(host.model.a.weight, weights(2)["a.weight"])


def test_an_engine_that_failed_takes_the_next_version_through_its_own_loader(host: ToyHost) -> None:
    """What copies would leave as a half commit has made it is put right."""
    engine = ToyEngine(host)
    source = weights(1)
    with WeightSync(source, [engine], transport="shm") as sync:
        sync.push("one")
        engine.receiver.state = "dirty"
        sessions = host.sessions
        sync.push("two")
        assert host.sessions == sessions + 2
        assert engine.receiver.applier
        assert engine.receiver.applier.direct == {"a", "b"}


def test_a_memory_engine_is_pushed_to_by_many_trainers() -> None:
    from helpers.toys import attention

    engine = MemoryEngine(attention(0), tp=2)
    for seed in range(1, 4):
        receipt = push(engine, f"v{seed}", attention(seed))
        assert engine.fingerprint() == MemoryEngine(attention(seed), tp=2).fingerprint()
    assert "not proved yet" not in receipt.reload.values()
    engine.inject("tensor", tensor=0)
    with pytest.raises(SyncError):
        push(engine, "broken", attention(4))
    push(engine, "healed", attention(5))
    assert engine.fingerprint() == MemoryEngine(attention(5), tp=2).fingerprint()


def test_a_receipt_names_layers_that_cannot_be_read_back() -> None:
    """The engine's loader got the right bytes; that it made the right thing of them is not claimed."""

    def doubled(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        model.get_parameter(name).copy_(tensor * 2 if name == "a.weight" and not tensor.is_meta else tensor)

    def computed(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        model.get_parameter(name).copy_(tensor * 2 if name == "a.weight" else tensor)

    why = ("a.weight is not stored as the checkpoint has it", "the loader computes its values on the way")
    for load, reason in zip((doubled, computed), why, strict=True):
        with WeightSync(weights(1), [ToyEngine(ToyHost(Model(), load))], transport="shm") as sync:
            for version in ("one", "two"):
                receipt = sync.push(version)
                assert receipt.engines[0].unproved == {"a": reason}
                assert f"not proved beyond its loader: a ({reason})" in str(receipt)
                assert receipt.engines[0].read_back == 1


def test_a_layer_that_was_read_back_once_is_read_back_in_every_push(host: ToyHost) -> None:
    host.finish = lambda model: setattr(model.a, "packed", model.a.weight.sum(1))
    source = weights(1)
    with WeightSync(source, [ToyEngine(host)], transport="shm") as sync:
        receipt = sync.push("one")
        assert (receipt.engines[0].reload, receipt.engines[0].unproved) == ({"a": "packed is derived from weights"}, {})
        assert receipt.engines[0].read_back == 2
        host.fill = lambda model, name, tensor: model.get_parameter(name).copy_(tensor + 1)
        with pytest.raises(SyncError, match=r"a\.weight does not hold the bytes of a\.weight after the engine's reload session"):
            sync.push("two")
