"""Tiny models as trainers shard them: how each is wrapped, trained by a step, and gathered again by the library that sharded it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from helpers.source_models import checkpoint_layers, llama, lora, qwen3, qwen3_moe
from instep.source.names import canonical

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])

MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": qwen3,
    "llama": llama,
    "moe": qwen3_moe,
    "lora": lambda: lora(llama(), target_modules="all-linear", modules_to_save=["lm_head"]),
    "lora-tied": lambda: lora(qwen3()),
    "lora-experts": lambda: lora(qwen3_moe(), target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
}


def plain(name: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(seed)
    model = MODELS[name]().to(dtype)
    for key, param in model.named_parameters():
        if "modules_to_save" in key:
            nn.init.normal_(param)
    return model


@dataclass
class Sharded:
    """module: what the trainer has. optimizer: None where DeepSpeed steps. whole: within it parameters can be read whole."""

    module: Any
    optimizer: Any
    whole: Callable[[], contextlib.AbstractContextManager[None]]
    plain: Any
    engine: Any = None

    def backward(self) -> None:
        loss = self.module(input_ids=TOKENS, labels=TOKENS).loss
        self.engine.backward(loss) if self.engine else loss.backward()

    def step(self) -> None:
        if self.engine:
            self.engine.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gathered(self) -> Any:
        """A plain model with the trainer's weights, by the trainer's own library."""
        twin = copy.deepcopy(self.plain)
        inner = self.module.module if self.engine else self.module
        with self.whole(), torch.no_grad():
            tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
            values = {
                canonical(name).removeprefix("module."): (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
                for name, value in tensors.items()
            }
        wanted = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
        assert values.keys() == wanted.keys(), values.keys() ^ wanted.keys()
        with torch.no_grad():
            for name, value in values.items():
                wanted[name].copy_(value)
        return twin


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]


def _trained(module: Any, model: Any, whole: Any = contextlib.nullcontext) -> Sharded:
    params = [param for param in module.parameters() if param.requires_grad]
    return Sharded(module, torch.optim.SGD(params, lr=1.0), whole, model)


def fsdp2(model: Any, copied: Any, **settings: Any) -> Sharded:
    for layer in decoder_layers(model):
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return _trained(model, copied)


def fsdp2_ignored(model: Any, copied: Any) -> Sharded:
    norms = {param for name, param in model.named_parameters() if "norm" in name}
    return fsdp2(model, copied, ignored_params=norms)


def fsdp2_columns(model: Any, copied: Any) -> Sharded:
    from torch.distributed.tensor import Shard

    return fsdp2(model, copied, shard_placement_fn=lambda param: Shard(param.ndim - 1))


def hybrid(model: Any, copied: Any) -> Sharded:
    return fsdp2(model, copied, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def compiled(model: Any) -> Any:
    layer: Any
    for layer in decoder_layers(model):
        layer.compile(backend="eager")
        layer.mlp = torch.compile(layer.mlp, backend="eager")
    return model


def tensor_parallel(model: Any, mesh: Any) -> None:
    for layer in decoder_layers(model):
        plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


def tp(model: Any, copied: Any) -> Sharded:
    tensor_parallel(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return _trained(model, copied)


def fsdp2_tp(model: Any, copied: Any) -> Sharded:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    return fsdp2(model, copied, mesh=mesh["dp"])


def fsdp1(model: Any, copied: Any, **settings: Any) -> Sharded:
    layers = ModuleWrapPolicy({type(layer) for layer in decoder_layers(model)})
    wrapped = Fsdp1(model, auto_wrap_policy=layers, device_id=torch.device("cpu"), **settings)
    return _trained(wrapped, copied, lambda: Fsdp1.summon_full_params(wrapped, writeback=False))


def zero(stage: int) -> Callable[[Any, Any], Sharded]:
    def wrap(model: Any, copied: Any) -> Sharded:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        params = [param for param in model.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(params, lr=1.0), config=config)

        @contextlib.contextmanager
        def whole() -> Iterator[None]:
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())) if stage == 3 else contextlib.nullcontext():
                yield

        return Sharded(engine, None, whole, copied, engine)

    return wrap


WRAPS: dict[str, Callable[[Any, Any], Sharded]] = {
    "plain": _trained,
    "ddp": lambda model, copied: _trained(DistributedDataParallel(model, find_unused_parameters=True), copied),
    "fsdp2": fsdp2,
    "fsdp2-unsharded": lambda model, copied: fsdp2(model, copied, reshard_after_forward=False),
    "fsdp2-ignored": fsdp2_ignored,
    "fsdp2-columns": fsdp2_columns,
    "fsdp2-compiled": lambda model, copied: fsdp2(compiled(model), copied),
    "fsdp2-checkpointed": lambda model, copied: fsdp2(checkpoint_layers(model), copied),
    "fsdp2-hybrid": hybrid,
    "fsdp2-tp": fsdp2_tp,
    "tp": tp,
    "fsdp1": fsdp1,
    "fsdp1-orig": lambda model, copied: fsdp1(model, copied, use_orig_params=True),
    "fsdp1-whole": lambda model, copied: fsdp1(model, copied, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp1-grad": lambda model, copied: fsdp1(model, copied, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    **{f"zero{stage}": zero(stage) for stage in range(4)},
}


def make(wrap: str, name: str, seed: int = 0) -> Sharded:
    model = plain(name, seed)
    return WRAPS[wrap](model, copy.deepcopy(model))
