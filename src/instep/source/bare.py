"""A module without its wrappers and adapters: what `save_pretrained` of the merged model would see,
made of the live tensors.

`bare` copies the structure alone. Layers with an unmerged PEFT adapter, or with weights that they
compute (`parametrized.py`), are listed beside it, and `merge` computes one of them when its bytes
are wanted: their own code runs on a private copy of that layer, so the trainer's weights are never
written.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from instep.errors import SourceError
from instep.source import parametrized
from instep.source.deepspeed import engine_module
from instep.source.names import WRAPPER_SEGMENTS

AROUND = (DistributedDataParallel, DataParallel, AveragedModel)
"""Modules around a whole `module`. What else they hold, such as how often an average was updated,
is none of its weights."""
UNMERGEABLE = "no engine was touched: peft's own merge_and_unload fails in the same way. Configure an adapter that it can merge"


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module inside any number of wrappers around the whole of it (DDP,
    `torch.compile`, PEFT, activation checkpointing, averages)."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def peft_model(module: nn.Module | None) -> Any | None:
    """Returns the `PeftModel` inside any number of wrappers around the whole of it, or None."""
    peft = sys.modules.get("peft")
    while peft is not None and module is not None and not isinstance(module, peft.PeftModel):
        module = _inner(module)
    return module if peft is not None else None


def bare(module: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """Copies a module's structure without wrappers, with base layers in the place of adapter
    layers. The copy shares every tensor.

    Also returns the layers whose weights `merge` computes, by their path in the copy.

    Raises `SourceError` for FSDP and for prompt-learning adapters, which no merge can express.
    """
    adapted: dict[str, Any] = {}
    return _bare(module, "", adapted, {}), adapted


def merge(path: str, layer: Any, own: Mapping[int, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Returns the state dict of `layer`'s base layer with its active adapters merged, bit for bit
    what peft's `merge_and_unload` computes. For a layer that computes weights itself, returns those
    weights.

    own: current values by the ids of the layer's tensors, for a layer on the meta device; the
    values are written to. Without `own` the call takes the memory of one layer. Raises
    `SourceError` when the weights cannot be computed.
    """
    if not _is_adapter_layer(layer):
        mine = own or {id(one): one.detach().clone() for one in (*layer.parameters(), *layer.buffers())}
        return parametrized.values(path, layer, lambda: _private_copy(layer, mine))
    private = _private_copy(layer, own or {id(param): param.detach().clone() for param in layer.get_base_layer().parameters()})
    try:
        with torch.no_grad():
            if hasattr(private, "unload_and_optionally_merge_module"):
                base = private.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                private.merge(safe_merge=False, adapter_names=None)
                base = private.get_base_layer()
    except Exception as error:
        raise SourceError(f"peft cannot merge the adapter of {path}: {error}", tensor=path, next_step=UNMERGEABLE) from error
    state: dict[str, torch.Tensor] = base.state_dict()
    return state


def owner(layer: Any) -> int:
    """Returns a key of what an adapter layer adds. Two layers whose adapters peft ties have the
    same key."""
    return id(getattr(layer, "tied_adapter", None) or layer)


def adapters(modules: Iterable[nn.Module]) -> list[Any]:
    """Returns those of `modules` that hold adapters."""
    if (peft := sys.modules.get("peft")) is None:
        return []
    kinds = (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper)
    return [module for module in modules if isinstance(module, kinds)]


def adapter_state(layers: Iterable[Any]) -> Hashable:
    """Returns a value that changes when adapters are switched, disabled, merged or scaled."""
    return tuple([
        (one.disable_adapters, tuple(one.active_adapters), tuple(one.merged_adapters), tuple(vars(one).get("scaling", {}).items()))
        for one in layers
    ])  # fmt: skip


def applies_adapters(layers: Iterable[Any]) -> bool:
    """Tells whether the forward of some adapter layer adds an adapter to its base weights now. The
    adapter may be merged in place or computed beside the weights."""
    return any(bool(layer.merged_adapters) or _unmerged(layer) for layer in layers if _is_adapter_layer(layer))


def _inner(module: nn.Module) -> nn.Module | None:
    """Returns the module that a wrapper wraps; None for a module that is no wrapper."""
    if "_fsdp_wrapped_module" in module._modules:
        raise SourceError("the module is sharded by FSDP: its parameters are not whole on this rank", next_step="push from all ranks")
    for segment in WRAPPER_SEGMENTS & module._modules.keys():
        if len(module._modules) > 1 or module._parameters or module._buffers:
            raise SourceError(
                f"{type(module).__name__} holds tensors beside the {segment} that it wraps", next_step="push the wrapped module"
            )
        return module._modules[segment]
    if isinstance(module, AROUND):
        wrapped: nn.Module = module.module
        return wrapped
    return engine_module(module) or _inner_of_peft(module)


def _inner_of_peft(module: Any) -> nn.Module | None:
    # A peft module can only exist where peft has been imported, so nothing is imported here.
    if (peft := sys.modules.get("peft")) is None:
        return None
    inner: nn.Module | None = None
    if isinstance(module, peft.PeftModel | peft.PeftMixedModel):
        inner = module.base_model
        if not isinstance(inner, peft.tuners.tuners_utils.BaseTuner):
            kinds = ", ".join(str(config.peft_type.value) for config in module.peft_config.values())
            raise SourceError(f"a {kinds} adapter cannot be merged into weights", next_step="train with LoRA or with full weights")
    elif isinstance(module, peft.tuners.tuners_utils.BaseTuner):
        inner = module.model
    elif isinstance(module, peft.utils.ModulesToSaveWrapper):
        active = module.active_adapters
        passed_by = module.disable_adapters or not active or active[0] not in module.modules_to_save
        inner = module.original_module if passed_by else module.modules_to_save[active[0]]
    elif isinstance(module, peft.utils.TrainableTokensWrapper):
        inner = module.token_adapter
    return inner


def _bare(module: nn.Module, path: str, adapted: dict[str, Any], done: dict[int, nn.Module]) -> nn.Module:
    module = unwrap(module)
    if _is_adapter_layer(module):
        base = _bare(module.get_base_layer(), path, adapted, done)  # type: ignore[operator]
        if _unmerged(module):
            if path in adapted:
                raise SourceError(
                    f"{path} has an adapter on weights that are parametrized: neither peft nor an engine can put the two together",
                    tensor=path,
                    next_step='torch.nn.utils.parametrize.remove_parametrizations(layer, "weight") before the adapter is put around it',
                )
            adapted[path] = module
        return base
    if names := parametrized.computed(module):
        adapted[path] = module
    if id(module) not in done:
        done[id(module)] = twin = _shallow_copy(module)
        twin._modules = {
            name: child if child is None else _bare(child, f"{path}.{name}" if path else name, adapted, done)
            for name, child in module._modules.items()
        }
        if names:
            parametrized.without(twin, merge(path, module))
    return done[id(module)]


def _is_adapter_layer(module: nn.Module) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)


def _unmerged(layer: Any) -> bool:
    """Tells whether the layer's forward adds an adapter that its base weights do not have.

    Adapter layers may wrap each other, one for each parameter of a module. Raises `SourceError` for
    an adapter that is disabled while it is merged: the trainer's next forward takes it out again.
    """
    links = list(_chain(layer))
    disabled = [link.disable_adapters for link in links]
    if any(disabled):
        if not all(disabled):
            raise SourceError("some adapters of a layer are disabled and others are not", next_step="enable or disable all of them")
        if any(link.merged_adapters for link in links):
            raise SourceError(
                "an adapter is merged into the base weights and disabled at once: the next forward takes it out of them",
                next_step="call unmerge_adapter() before disable_adapter(), then push",
            )
        return False
    return any(set(link.active_adapters) & link._get_available_adapters() for link in links if not link.merged_adapters)


def _chain(layer: Any) -> Iterator[Any]:
    while _is_adapter_layer(layer):
        yield layer
        layer = layer.base_layer


def _private_copy(module: nn.Module, own: Mapping[int, torch.Tensor]) -> Any:
    """Copies the structure of an adapter layer, with `own` values for the tensors with these ids.
    The others share the trainer's memory, but none is the trainer's Parameter, because peft may set
    a Parameter's `data`."""
    module = unwrap(module)
    twin = _shallow_copy(module)
    twin._parameters = {
        name: param if param is None else nn.Parameter(own.get(id(param), param.detach()), requires_grad=False)
        for name, param in module._parameters.items()
    }
    twin._buffers = {name: own.get(id(buffer), buffer) for name, buffer in module._buffers.items()}
    twin._modules = {name: child if child is None else _private_copy(child, own) for name, child in module._modules.items()}
    return twin


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a module with the same tensors and children. Its containers are copied, because peft
    notes in a layer's lists what it has merged."""
    twin: nn.Module = module.__new__(type(module))
    twin.__dict__ = own_attributes(module)
    return twin


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes, with their containers copied. ZeRO-3 keeps parameters in its
    own subclass of dict, which cannot be copied."""
    attributes = {**module.__dict__, "_parameters": dict(module._parameters.items())}
    return {name: value.copy() if isinstance(value, list | set | dict) else value for name, value in attributes.items()}
