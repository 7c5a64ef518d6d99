"""What counts as the same module: a push that keeps its plan must see every change of names, places and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from instep.source.live import Live
from instep.source.module import ModuleSource


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.two = nn.Module()
        self.norm = nn.BatchNorm1d(4)
        self.one.register_buffer("kept", torch.ones(1))
        self.one.register_buffer("scratch", torch.ones(1), persistent=False)


def _rename_a_tensor(module: Any) -> None:
    module.norm._buffers["batches"] = module.norm._buffers.pop("num_batches_tracked")


def _rename_a_module(module: Any) -> None:
    module._modules["last"] = module._modules.pop("norm")


def _move_a_tensor(module: Any) -> None:
    """Objects and names follow one another as before."""
    module.two.register_parameter("weight", module.one._parameters.pop("weight"))


def _move_one_of_two(module: Any) -> None:
    """The same, from one registry into the next."""
    module.norm._parameters["running_mean"] = module.norm._buffers.pop("running_mean")


def _replace_a_registry(module: Any) -> None:
    module.one._parameters = dict(module.one._parameters)


def _replace_by_an_equal_one(module: Any) -> None:
    module.one.weight = nn.Parameter(module.one.weight.detach().clone())


def _replace_a_module(module: Any) -> None:
    module.two = nn.Module()


def _save_a_buffer(module: Any) -> None:
    module.one._non_persistent_buffers_set.remove("scratch")


def _do_not_save_one(module: Any) -> None:
    module.one._non_persistent_buffers_set.add("kept")


def _remove(module: Any) -> None:
    del module.norm


def _add_a_buffer(module: Any) -> None:
    module.two.register_buffer("late", torch.ones(1))


def _add_a_bias(module: Any) -> None:
    module.one.bias = nn.Parameter(torch.ones(4))


def _other_memory(module: Any) -> None:
    module.one.weight.data = module.one.weight.data.clone()


def _other_strides(module: Any) -> None:
    module.one.weight.data = module.one.weight.data.t()


def _other_shape(module: Any) -> None:
    module.one.weight.data = module.one.weight.data.view(2, 8)


def _other_dtype(module: Any) -> None:
    module.one.weight.data = module.one.weight.data.view(torch.int32).view(torch.float16)


CHANGES = [
    _rename_a_tensor, _rename_a_module, _move_a_tensor, _move_one_of_two, _replace_a_registry, _replace_by_an_equal_one, _replace_a_module,
    _save_a_buffer, _do_not_save_one, _remove, _add_a_buffer, _add_a_bias, _other_memory, _other_strides, _other_shape, _other_dtype,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_structure_is_seen(change: Callable[[Any], None]) -> None:
    module = Block()
    live = Live(module)
    assert live.holds(module)
    change(module)
    assert not live.holds(module)
    assert Live(module).holds(module)


def test_another_module_is_not_the_same() -> None:
    module = Block()
    assert not Live(module).holds(Block())


def test_values_are_no_structure() -> None:
    module = Block()
    live = Live(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.norm(module.one(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    module.load_state_dict(Block().state_dict())
    module.eval().requires_grad_(False)
    assert live.holds(module)


def test_names_and_tensors_are_those_of_the_state_dict() -> None:
    module = Block()
    live = Live(module)
    state = module.state_dict(keep_vars=True)
    assert live.names == list(state)
    assert all(tensor is state[name] for name, tensor in zip(live.names, live.tensors, strict=True))


def test_a_source_describes_itself_anew_only_when_its_structure_has_changed() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    source = ModuleSource(module)
    before, stamp = source.metadata(), source.stamp()
    with torch.no_grad():
        module[0].weight.add_(1)
    assert source.metadata() is before
    assert source.stamp() != stamp
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    assert source.metadata() is not before
    assert source.metadata() == before


def test_tensors_are_those_that_the_stamp_saw() -> None:
    module = nn.Sequential(nn.Linear(2, 3, bias=False))
    source = ModuleSource(module)
    source.metadata()
    module[0].weight = nn.Parameter(torch.ones(3, 2))
    source.stamp()
    ((name, tensor),) = source.tensors()
    assert (name, tensor.data_ptr()) == ("0.weight", module[0].weight.data_ptr())
