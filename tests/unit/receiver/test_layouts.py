"""Live parameters that do not lie in memory in the order of their elements: written right, copied directly, and read back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.pretend_cuda import pretend
from helpers.toys import ToyHost
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep import TransformersEngine, WeightSync
from instep.plan.region import contiguous_stride, strided, view, whole
from instep.protocol import Region
from instep.receiver.regions import load_region
from unit.transport.test_ipc import ToyEngine


@st.composite
def copies(draw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A live tensor in any order, with gaps; a view of it in C order that a loader writes to; that view's place in the other."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    room = torch.zeros([shape[axis] + draw(st.integers(0, 2)) for axis in order])
    live = room[tuple(slice(0, shape[axis]) for axis in order)].permute([order.index(axis) for axis in range(len(shape))])
    assert live.shape == shape
    in_order = torch.arange(1.0, 1 + live.numel()).view(shape)
    part = in_order
    for axis, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        part = part[(slice(None),) * axis + (slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 2))),)]
    if draw(st.booleans()):
        part = part.transpose(0, -1)
    return live, in_order, part


@given(copies())
def test_a_region_of_any_tensor_is_written_where_its_elements_are(case: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    live, in_order, part = case
    target = Region(int(part.storage_offset()), tuple(part.shape), part.stride())
    load_region(live, target, part.clone())
    expected = torch.zeros_like(in_order)
    view(expected, target).copy_(part)
    assert torch.equal(live, expected)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_whole_tensor_goes_into_any_order(shape: list[int]) -> None:
    turned = torch.zeros(shape[::-1]).permute(*range(len(shape))[::-1])
    found = strided(whole(shape), whole(shape), shape, turned.stride())
    assert found is not None
    values = torch.arange(float(turned.numel())).view(shape)
    view(turned, found[1]).copy_(view(values, found[0]))
    assert torch.equal(turned, values)


def test_what_takes_more_than_strides_is_none() -> None:
    source = Region(0, (4,), (1,))
    for target in (Region(4, (4,), (1,)), Region(0, (4,), (7,)), Region(0, (4,), (0,))):
        assert strided(source, target, (6, 6), (1, 6)) is None
    assert contiguous_stride((6, 6)) == (6, 1)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.full((tensor.shape[0], 3 * tensor.shape[1]), 7, dtype=tensor.dtype)
    part = room[:, tensor.shape[1] : 2 * tensor.shape[1]]
    part.copy_(tensor)
    return part


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(2 * len(tensor), *tensor.shape[1:], dtype=tensor.dtype)
    room[::2] = tensor
    return room[::2]


def tiny(seed: int) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64))


@pytest.mark.parametrize("lay", [transposed, with_gaps, every_second])
def test_a_language_model_whose_weights_lie_otherwise_follows_every_push(lay: Any) -> None:
    trainer, served = tiny(1), tiny(2)
    for layer in served.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            layer.weight = nn.Parameter(lay(layer.weight.detach()))
            assert not layer.weight.is_contiguous()
    with WeightSync(trainer, [TransformersEngine(served)]) as sync:
        for version in ("one", "two", "three"):
            with torch.no_grad():
                for param in trainer.parameters():
                    param.mul_(1.01)
            receipt = sync.push(version)
            assert receipt.engines[0].reload == {}
            assert receipt.engines[0].read_back == receipt.tensors
            state = served.state_dict()
            assert all(torch.equal(state[name], value) for name, value in trainer.state_dict().items())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.LayerNorm(8)


def fill(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("transport", ["shm", "ipc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_with_channels_last_is_copied_directly(transport: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    served: Any = Convolution().to(dtype)
    served = served.to(memory_format=torch.channels_last)
    trainer = Convolution().to(dtype)
    host = ToyHost(served, fill)
    with WeightSync(trainer, [ToyEngine(host)], transport=transport, timeout=20) as sync:
        for version in ("one", "two"):
            with torch.no_grad():
                for param in trainer.parameters():
                    param.add_(1)
            receipt = sync.push(version)
            assert receipt.engines[0].direct == ("conv", "norm")
            assert torch.equal(served.conv.weight, trainer.conv.weight)
    assert served.conv.weight.is_contiguous(memory_format=torch.channels_last)
