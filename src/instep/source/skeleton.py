"""A sharded module's structure, with a tensor on the meta device in the place of each one, and what
this rank holds of each.

Names, ties, adapters and the checkpoint layout are read from a skeleton as from a whole module, on
every rank alike. The trainer's module is never written: no hook runs, nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import DTensor

from instep.errors import SourceError
from instep.protocol import ITEM_BYTES, dtype_name
from instep.source.bare import AROUND, adapter_state, adapters, own_attributes
from instep.source.deepspeed import engine_module, partition, partitioned
from instep.source.fsdp import Slot, shards
from instep.source.local_shard import LocalShard, of_dtensor, whole
from instep.source.names import WRAPPER_SEGMENTS
from instep.source.tensors import check, identity


def is_sharded(module: nn.Module) -> bool:
    """Whether some parameter is not whole on this rank."""
    return bool(shards(module)) or any(isinstance(one, DTensor) or partitioned(one) for one in _live_tensors(module))


def structure(module: nn.Module) -> Hashable:
    """Returns a value that changes when modules, names or adapters do. A skeleton holds until
    then."""
    modules = list(module.modules())
    facts = [(id(one), *one._modules, 0, *one._parameters, 0, *one._buffers, *one._non_persistent_buffers_set) for one in modules]
    return tuple(facts), adapter_state(adapters(modules))


class Skeleton:
    """Copies a module's structure without the wrappers of training. module: the copy, with adapters
    left in place.

    held: this rank's shard of each tensor, by the id of the stand-in on the meta device. names: the
    name of each stand-in, by its id.
    """

    def __init__(self, root: nn.Module) -> None:
        self.held: dict[int, LocalShard] = {}
        self._sharded = shards(root)
        self._shapes: dict[Hashable, torch.Tensor] = {}  # by a key that tied tensors share
        self._twins: dict[int, nn.Module] = {}
        self.module = self._twin(root)
        found = [*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers(remove_duplicate=False)]
        self.names: dict[int, str] = {}
        for name, tensor in found:
            if id(tensor) in self.held:
                self.names.setdefault(id(tensor), name)
        for key, name in self.names.items():
            _check(name, self.held[key])
        self._looks = self._look()

    def fits(self) -> bool:
        """Whether every tensor still has the same local dtype, size and device."""
        return self._looks == self._look()

    def _look(self) -> list[Hashable]:
        return [(local.dtype, local.numel(), local.device) for local in (held.local() for held in self.held.values())]

    def _twin(self, module: nn.Module) -> nn.Module:
        module = _unwrap(module)
        if id(module) not in self._twins:
            self._twins[id(module)] = twin = object.__new__(_own_class(module))
            # FSDP's hooks would act on the live module; names that stand for sharded parameters may
            # be plain attributes.
            twin.__dict__ = own_attributes(module) | {"_state_dict_pre_hooks": type(module._state_dict_pre_hooks)()}
            own = [name for name, param in module._parameters.items() if not isinstance(param, FlatParameter)]
            names = [*own, *(name for key, name in self._sharded if key == id(module) and name not in own)]
            twin._parameters = {name: self._parameter(module, name) for name in names}
            twin._buffers = {name: self._buffer(module, name) for name in module._buffers}
            for name in names:
                vars(twin).pop(name, None)
            twin._modules = {name: None if child is None else self._twin(child) for name, child in module._modules.items()}
        return self._twins[id(module)]

    def _parameter(self, module: nn.Module, name: str) -> Any:
        slot: Slot = (id(module), name)
        if slot in self._sharded:
            return self._shape(id(self._sharded[slot]), lambda: self._sharded[slot])
        return self._tensor(module._parameters[name], name, lambda: module._parameters[name])

    def _buffer(self, module: nn.Module, name: str) -> Any:
        if name in module._non_persistent_buffers_set:
            return module._buffers[name]
        return self._tensor(module._buffers[name], name, lambda: module._buffers[name])

    def _tensor(self, tensor: Any, name: str, get: Callable[[], Any]) -> Any:
        if tensor is None:
            return None
        if isinstance(tensor, DTensor):
            return self._shape(id(tensor), lambda: of_dtensor(name, get))
        if partitioned(tensor):
            return self._shape(id(tensor), lambda: partition(name, tensor))
        key = id(tensor) if tensor.is_meta or not tensor.numel() else identity(tensor)
        return self._shape(key, lambda: whole(get))

    def _shape(self, key: Hashable, hold: Callable[[], LocalShard]) -> torch.Tensor:
        if key not in self._shapes:
            held = hold()
            shape = nn.Parameter(torch.empty(held.shape, dtype=held.dtype, device="meta"), requires_grad=False)
            self._shapes[key], self.held[id(shape)] = shape, held
        return self._shapes[key]


def _live_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for one in module.modules():
        yield from (tensor for tensor in (*one._parameters.values(), *one._buffers.values()) if tensor is not None)


def _unwrap(module: nn.Module) -> nn.Module:
    """Returns the module inside the wrappers that training puts around it. Adapters are kept."""
    while True:
        inner: Any = engine_module(module)
        if isinstance(module, AROUND):
            inner = module.module
        inner = next((module._modules[name] for name in WRAPPER_SEGMENTS & module._modules.keys()), inner)
        if inner is None:
            return module
        module = inner


def _own_class(module: nn.Module) -> type[nn.Module]:
    """Returns the module's class before FSDP replaced it by a subclass."""
    kind = type(module)
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)] if isinstance(module, FSDPModule) else kind


def _check(name: str, held: LocalShard) -> None:
    memory = held.memory()
    if memory.numel():
        check(name, memory)
    if not math.prod(held.shape):
        raise SourceError(f"{name} has no elements (shape {held.shape})", tensor=name)
    if dtype_name(held.dtype) not in ITEM_BYTES:
        raise SourceError(f"{name} has dtype {dtype_name(held.dtype)}, which cannot travel", tensor=name)
