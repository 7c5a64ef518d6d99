"""A source with more around the model than the engine wants: the refusal says what to push instead, and that fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from instep import MemoryEngine, WeightSync
from instep.errors import PlanError
from unit.test_push import is_fresh

pytestmark = pytest.mark.usefixtures("segments")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 3, bias=False)


class ValueHead(nn.Module):
    """Its state dict names the model's tensors as the model does, as TRL's does."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model, self.v_head = Model(), nn.Linear(8, 1)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        own = self.pretrained_model.state_dict(*args, **kwargs)
        return own | {f"v_head.{name}": value for name, value in self.v_head.state_dict(*args, **kwargs).items()}


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = ValueHead(), nn.Linear(8, 20)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.v_head = Model(), nn.Linear(8, 1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Model(), Model()


def refused(source: Any, engine: MemoryEngine) -> str:
    before = engine.fingerprint()
    with WeightSync(source, [engine]) as sync, pytest.raises(PlanError) as caught:
        sync.push("v1")
    assert engine.fingerprint() == before
    assert caught.value.next_step is not None
    return caught.value.next_step


def engine() -> MemoryEngine:
    return MemoryEngine(Model().state_dict())


def advised(source: Any, target: MemoryEngine) -> Any:
    """What the advice evaluates to."""
    how = refused(source, target).rpartition("Push that: WeightSync(source=")[2].removesuffix(")")
    return eval(how, {"source": source})


@pytest.mark.parametrize("wrapper", [ValueHead, ActorCritic])
def test_a_model_in_a_wrapper_is_named_and_fits(wrapper: Any) -> None:
    source, target = wrapper(), engine()
    inner = advised(source, target)
    assert isinstance(inner, Model)
    with WeightSync(inner, [target]) as sync:
        sync.push("v1")
    assert is_fresh(target, inner.state_dict())


def test_a_compiled_wrapper_is_seen_through() -> None:
    assert isinstance(advised(torch.compile(ActorCritic()), engine()), Model)


@pytest.mark.parametrize("prefix", ["module.", "policy.model."])
def test_names_with_a_prefix_are_advised_without_it(prefix: str) -> None:
    model, target = Model(), engine()
    source = {prefix + name: tensor for name, tensor in model.state_dict().items()} | {"v_head.weight": torch.ones(3)}
    with WeightSync(advised(source, target), [target]) as sync:
        sync.push("v1")
    assert is_fresh(target, model.state_dict())


def test_names_of_a_compiled_models_state_dict_are_the_models() -> None:
    model, target = Model(), engine()
    compiled: Any = torch.compile(model)
    with WeightSync(compiled.state_dict(), [target]) as sync:
        sync.push("v1")
    assert is_fresh(target, model.state_dict())


@pytest.fixture
def alone_in_its_group() -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone_in_its_group")
def test_a_model_in_a_sharded_wrapper_is_named_and_fits() -> None:
    source: Any = fully_shard(Wrapper(), mesh=init_device_mesh("cpu", (1,)))
    target = engine()
    inner = advised(source, target)
    assert inner is source.policy
    with WeightSync(inner, [target]) as sync:
        sync.push("v1")
    assert is_fresh(target, {name: tensor.full_tensor() for name, tensor in inner.state_dict().items()})


def test_where_two_fit_both_are_named() -> None:
    step = refused(Two(), engine())
    assert "WeightSync(source=source.policy) or WeightSync(source=source.reference)" in step


def test_where_nothing_fits_the_advice_is_as_it_was() -> None:
    assert "Push that" not in refused({"module.other": torch.ones(3)}, engine())


def test_a_push_that_fits_after_one_that_did_not_is_planned_anew() -> None:
    model, target = Model(), engine()
    source: dict[str, torch.Tensor] = dict(model.state_dict())
    with WeightSync(source, [target]) as sync:
        sync.push("v1")
        source["extra"] = torch.ones(3)
        with pytest.raises(PlanError):
            sync.push("v2")
        del source["extra"]
        with torch.no_grad():
            model.inner.weight.neg_()
        sync.push("v2")
    assert is_fresh(target, model.state_dict())
