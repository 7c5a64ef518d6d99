"""vLLM's own reload session around small layers, without an engine: each layer stands for something that models do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from instep.engine.vllm.worker import VllmHost
from instep.errors import PlanError
from instep.plan.routes import prove
from instep.protocol import TensorMeta, WorkerPlan
from instep.receiver.apply import Applier
from instep.receiver.arrival import Seen
from instep.receiver.trace import trace

Load = Callable[[nn.Module, str, torch.Tensor], object]


def through_loader(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    getattr(tensors[name], "weight_loader", default_weight_loader)(tensors[name], tensor)


def past_loader(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


class Layer(nn.Module):
    """A weight, and a bias, which vLLM keeps live."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 6), 7.0))
        self.bias = nn.Parameter(torch.full((4,), 7.0))


class Router(nn.Module):
    """Its correction bias is a buffer, as transformers has it, and stays live in a session."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 6), 7.0))
        self.register_buffer("e_score_correction_bias", torch.full((4,), 7.0))


class Experts(nn.Module):
    """Two of four experts, in the order that a map says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), 7.0))
        self.register_buffer("_expert_map", torch.tensor([-1, 1, -1, 0], dtype=torch.int32), persistent=False)

        def load(param: nn.Parameter, tensor: torch.Tensor) -> None:
            for expert in range(4):
                if (place := self._expert_map[expert].item()) >= 0:
                    param.data[place].copy_(tensor[expert])

        self.weight.weight_loader = load


@pytest.fixture
def host_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module, Load], VllmHost]:
    @contextmanager
    def context(_: Any) -> Iterator[None]:
        yield

    def make(layer: nn.Module, load: Load) -> VllmHost:
        from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

        model = nn.Module()
        model.layer = layer
        model.requires_grad_(False)
        record_metadata_for_reloading(model)

        def load_weights(tensors: Any) -> None:
            for name, tensor in tensors:
                load(model, name, tensor)

        model.load_weights = load_weights
        host = VllmHost.__new__(VllmHost)
        runner = SimpleNamespace(get_model=lambda: model, model_config=None)
        config = SimpleNamespace(parallel_config=SimpleNamespace())
        host.worker = SimpleNamespace(model_runner=runner, vllm_config=config)
        host.device, host.rank, host.world_size, host.busy = "cpu", 0, 1, False
        host.views = []
        return host

    monkeypatch.setattr(VllmHost, "_context", context)
    return make


def version(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {f"layer.{name}": torch.randn(shape) for name, shape in shapes.items()}


def described(tensors: dict[str, torch.Tensor]) -> list[TensorMeta]:
    return [TensorMeta(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()]


def traced(host: VllmHost, tensors: dict[str, torch.Tensor]) -> WorkerPlan:
    """The plan, and that tracing has left every live tensor as it was."""
    model = host.model
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (tensor, tensor.data_ptr(), tensor.clone()) for name, tensor in live.items()}
    plan = trace(host, described(tensors))
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == before.keys()
    for name, (tensor, address, values) in before.items():
        assert after[name] is tensor
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, values)
    prove("engine", described(tensors), [plan], cast=False)
    return plan


def pushed(host: VllmHost, plan: WorkerPlan, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a session leaves the version in the model, in the tensors that it had."""
    live = {**dict(host.model.named_parameters()), **dict(host.model.named_buffers())}
    Applier(host, plan).session(tensors)
    now = {**dict(host.model.named_parameters()), **dict(host.model.named_buffers())}
    return all(now[name] is live[name] for name in live) and all(torch.equal(now[name], tensors[name]) for name in tensors)


def test_tensors_that_vllm_keeps_live_are_traced(host_of: Callable[..., VllmHost]) -> None:
    for layer, tensors in ((Layer(), version(weight=(4, 6), bias=(4,))), (Router(), version(weight=(4, 6), e_score_correction_bias=(4,)))):
        host = host_of(layer, through_loader)
        for _ in range(2):
            plan = traced(host, tensors)
            assert {route.param for route in plan.routes} == tensors.keys()
            assert plan.unnoticed == []
            assert pushed(host, plan, tensors)
            tensors = {name: tensor + 1 for name, tensor in tensors.items()}


def test_a_router_s_bias_that_the_source_lacks_is_missed(host_of: Callable[..., VllmHost]) -> None:
    """Its name is among those that vLLM's session does not wait for, and checkpoints have it all the same."""
    host = host_of(Router(), through_loader)
    tensors = version(weight=(4, 6))
    with pytest.raises(PlanError, match=r"nothing in the source fills the buffer layer\.e_score_correction_bias"):
        traced(host, tensors)


def test_a_loader_reads_the_map_of_experts_while_it_is_traced(host_of: Callable[..., VllmHost]) -> None:
    host = host_of(Experts(), through_loader)
    plan = trace(host, described(tensors := version(weight=(4, 3))))
    assert {(route.source.offset, route.target.offset) for route in plan.routes} == {(3, 3), (9, 0)}
    Applier(host, plan).session(tensors)
    assert torch.equal(host.model.layer.weight, tensors["layer.weight"][[3, 1]])
    assert host.model.layer._expert_map.tolist() == [-1, 1, -1, 0]


def filling(param: nn.Parameter, tensor: torch.Tensor) -> None:
    param.data.fill_(tensor.item())


def of_a_view(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    param = model.get_parameter(name)
    for row in range(len(param)):
        param.weight_loader(param.data[row], tensor[row]) if hasattr(param, "weight_loader") else param.data[row].copy_(tensor[row])


class Weight(nn.Module):
    def __init__(self, *shape: int, loader: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 7.0))
        if loader:
            self.weight.weight_loader = loader


def test_a_loader_without_a_name_is_given_one(host_of: Callable[..., VllmHost]) -> None:
    """vLLM's session reads the name of each loader."""
    host = host_of(Weight(4, 6, loader=partial(lambda param, tensor, rows: param.data[:rows].copy_(tensor), rows=4)), through_loader)
    for _ in range(2):
        tensors = version(weight=(4, 6))
        assert pushed(host, traced(host, tensors), tensors)


UNNOTICED: dict[str, tuple[Callable[[], nn.Module], Load, dict[str, tuple[int, ...]]]] = {
    "copies past the loader": (Layer, past_loader, {"weight": (4, 6), "bias": (4,)}),
    "gives the loader a view": (lambda: Weight(4, 6), of_a_view, {"weight": (4, 6)}),
    "fills with a number": (lambda: Weight(1, loader=filling), through_loader, {"weight": (1,)}),
}


@pytest.mark.parametrize(("layer", "load", "shapes"), UNNOTICED.values(), ids=UNNOTICED)
def test_what_vllm_s_session_would_not_notice_is_brought_all_the_same(
    host_of: Callable[..., VllmHost], layer: Callable[[], nn.Module], load: Load, shapes: dict[str, tuple[int, ...]]
) -> None:
    host, tensors = host_of(layer(), load), version(**shapes)
    with suppress(Exception), host.reload():  # vLLM's own
        host.load(tensors.items())
    assert not torch.equal(host.model.layer.weight, tensors["layer.weight"])
    for _ in range(2):
        plan = traced(host, tensors)
        assert plan.unnoticed == ["layer"]
        assert pushed(host, plan, tensors)
        tensors = {name: tensor + 1 for name, tensor in tensors.items()}


def test_a_weight_that_another_layer_has_emptied_is_filled_again(host_of: Callable[..., VllmHost]) -> None:
    """As attention does with the projection that it absorbs: vLLM's session cannot copy into what it left."""
    host, tensors = host_of(layer := Layer(), through_loader), version(weight=(4, 6), bias=(4,))
    layer.register_parameter("scale", None)
    for _ in range(2):
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        Applier(host, trace(host, described(tensors))).session(tensors)
        assert all(torch.equal(host.model.get_parameter(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("order", [("weight", "scale"), ("scale", "weight")])
def test_a_parameter_that_a_loader_registers_in_each_load_is_brought(host_of: Callable[..., VllmHost], order: tuple[str, str]) -> None:
    """As the bias of a head. vLLM has not seen it when it took down what there is to load."""

    def load(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name.endswith("scale"):
            model.layer.scale = nn.Parameter(torch.empty(4), requires_grad=False)
            model.layer.scale.data.copy_(tensor)
        else:
            through_loader(model, name, tensor)

    shapes = {"weight": (4, 6), "scale": (4,)}
    host, tensors = host_of(Weight(4, 6), load), version(**{name: shapes[name] for name in order})
    host.load(tensors.items())
    for _ in range(2):
        tensors = {name: tensor + 1 for name, tensor in tensors.items()}
        plan = traced(host, tensors)
        assert {route.param for route in plan.routes} == tensors.keys()
        Applier(host, plan).session(tensors)
        assert all(torch.equal(host.model.get_parameter(name), tensor) for name, tensor in tensors.items())


def packing() -> Any:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Packing(QuantizeMethodBase):
        """Gives the weight other memory, as the CPU's kernels of convolutions want it."""

        def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

        def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise AttributeError("it is no linear layer")

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.unpacked = layer.weight.view(4, 6).clone()
            layer.weight.data = layer.weight.data.flip(0)

    return Packing()


class Mixer(nn.Module):
    """It has the convolution's weight in a buffer too, which is a view until the weight is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Weight(4, 1, 6)
        self.conv.quant_method = packing()
        self.register_buffer("conv_weights", self.conv.weight.data.view(4, 6), persistent=False)


def test_a_buffer_that_was_a_view_of_a_weight_follows_it_after_packing(host_of: Callable[..., VllmHost]) -> None:
    host = host_of(mixer := Mixer(), through_loader)
    host.load(version(**{"conv.weight": (4, 1, 6)}).items())
    mixer.conv.quant_method.process_weights_after_loading(mixer.conv)
    tensors = version(**{"conv.weight": (4, 1, 6)})
    applier = Applier(host, trace(host, described(tensors)))
    for _ in range(3):
        with torch.no_grad():
            arrival = Seen(tensors, described(tensors))
            applier.apply(arrival)
        raw = tensors["layer.conv.weight"]
        assert torch.equal(mixer.conv_weights, raw.view(4, 6))
        assert torch.equal(mixer.conv.unpacked, raw.view(4, 6))
        assert torch.equal(mixer.conv.weight, raw.flip(0))
        tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    assert "process_weights_after_loading" not in vars(mixer.conv.quant_method)


def test_a_layer_is_tried_with_numbers_of_its_weight_s_dtype(host_of: Callable[..., VllmHost]) -> None:
    """Kernels that pack a float32 router read what they are given as float32, whatever the model's dtype is."""
    host = host_of(layer := Layer(), through_loader)
    host.worker.vllm_config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    given = list[torch.Tensor]()
    layer.input_size = 6
    layer.quant_method = SimpleNamespace(apply=lambda _, x, bias: given.extend((x, bias)) or x)
    host.computes("layer")
    assert given[0].dtype is torch.float32
    assert given[1] is layer.bias
