"""Buffers that a checkpoint has are weights: each is written, or the push is refused with its name (invariant 4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.toys import ToyHost
from torch import nn

from instep import TransformersEngine, WeightSync
from instep.errors import PlanError
from instep.receiver.trace import trace
from unit.transport.test_ipc import ToyEngine

pytestmark = pytest.mark.usefixtures("segments")


class Router(nn.Module):
    """`bias` is saved, `cache` is not, and `scale` is one that the loader knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.bias: torch.Tensor
        self.lin = nn.Linear(4, 4)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.register_buffer("scale", torch.ones(()))


def fill(model: Any, name: str, tensor: torch.Tensor) -> None:
    known = dict(model.named_parameters()) | {"bias": model.bias, "cache": model.cache}
    known[name].copy_(tensor)


def push(engine: Any, source: Any) -> Any:
    with WeightSync(source, [engine], transport="shm") as sync:
        return sync.push("one")


def test_parameters_alone_are_refused_where_the_engine_has_a_buffer_of_the_checkpoint() -> None:
    host, trainer = ToyHost(Router(), fill), Router()
    trainer.bias.fill_(7)
    with pytest.raises(PlanError, match=r"nothing in the source fills the buffer bias \[4\]") as caught:
        push(ToyEngine(host), dict(trainer.named_parameters()))
    assert "state dict" in str(caught.value)
    assert host.model.bias.sum() == 0


def test_a_buffer_that_is_given_is_written_and_proved() -> None:
    host, trainer = ToyHost(Router(), fill), Router()
    trainer.bias.fill_(7)
    receipt = push(ToyEngine(host), {**dict(trainer.named_parameters()), "bias": trainer.bias})
    assert torch.equal(host.model.bias, trainer.bias)
    assert receipt.engines[0].read_back == receipt.tensors == 3


def test_buffers_of_the_engine_alone_are_kept_with_the_reason() -> None:
    plan = trace(ToyHost(Router(), fill), [])
    kept = {param.name: param.kept for param in plan.params if param.buffer}
    assert kept == {"bias": None, "scale": "the engine's loader has no place for it"}


def test_asking_for_a_buffer_writes_nothing_live() -> None:
    host = ToyHost(Router(), fill)
    before = {name: (id(buffer), buffer.clone()) for name, buffer in host.model.named_buffers()}
    trace(host, [])
    for name, buffer in host.model.named_buffers():
        assert id(buffer) == before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_statistics_of_a_batch_norm_are_asked_for() -> None:
    def load(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        (dict(model.named_parameters()) | dict(model.named_buffers()))[name].copy_(tensor)

    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(PlanError, match=r"fills the buffer 1\.(running_mean|running_var|num_batches_tracked)"):
        push(ToyEngine(ToyHost(model, load)), dict(model.named_parameters()))
    trainer: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    trainer(torch.randn(8, 3))
    push(ToyEngine(ToyHost(model, load)), trainer)
    assert torch.equal(model[1].running_var, trainer[1].running_var)
    assert model[1].num_batches_tracked == 1


def deepseek() -> Any:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": None}
    widths = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes, **heads, **widths, **experts))


def test_the_bias_of_a_router_reaches_a_transformers_engine_or_is_asked_for() -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    trainer, served = deepseek(), deepseek()
    trainer.get_buffer(name).fill_(5)
    from instep.source.module import ModuleSource

    without = {given: tensor for given, tensor in ModuleSource(trainer).tensors() if given != name}
    with pytest.raises(PlanError, match="e_score_correction_bias"):
        push(TransformersEngine(served), without)
    push(TransformersEngine(served), trainer)
    assert served.get_buffer(name).tolist() == [5.0] * 4
