"""Routes by watching the engine's own loader work on tensors that have shapes but no bytes.

Every `copy_` from a checkpoint tensor into a parameter is written down as (region of the tensor) -> (region of the parameter). No knowledge
of a model family is needed: fused layers, tensor-parallel slices, padding and experts are whatever the loader does. What cannot be
written as copies (arithmetic on the way, in-place updates) marks its layer as `reload_only`, and what it was computed from is noted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instep.errors import InstepError, PlanError
from instep.plan.region import simplify
from instep.protocol import ParamMeta, Region, Route, TensorMeta, WorkerPlan, dtype_name
from instep.receiver import Host
from instep.receiver.ties import check_ties, owners

aten = torch.ops.aten
Origin = tuple[str, Region]
"""Elements of a checkpoint tensor."""
COMPUTED = ("", Region(0, (), ()))  # a scalar that is no element of a checkpoint tensor
SAME_ELEMENTS = (aten.clone.default, aten._to_copy.default, aten.contiguous.default)
NO_PLACE = "the engine's loader has no place for it"


def trace(host: Host, tensors: Sequence[TensorMeta]) -> WorkerPlan:
    """What the worker's loader would do with `tensors`. Nothing live is written.

    Raises `PlanError`, naming the tensor, where the loader refuses it, and where two tensors would go
    to the same memory.
    """
    real = [meta for meta in tensors if not meta.alias_of]
    live_owner = owners(host.model)
    plan = _watch(host, real, live_owner)
    # Aliases are offered only to an engine that misses them: a loader that ties its head may not know the name.
    if len(real) < len(tensors) and any(_unwritten(plan)):
        plan = _watch(host, tensors, live_owner)
    check_ties(host.model, plan, tensors)
    return plan


@contextmanager
def shape_only(model: nn.Module) -> Iterator[None]:
    """Within it every parameter and buffer has a shape and no bytes; afterwards the live ones are back.

    The checkpoint layout of a model that keeps its tensors as its loader takes them. There they are
    contiguous: a region of a tensor counts its elements in order, however it lies in memory.
    """
    live = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        for module, parameters, buffers in live:
            for name, param in parameters.items():
                if param is not None:
                    module._parameters[name] = nn.Parameter(_shape_of(param), requires_grad=False)
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = _shape_of(buffer)
        yield
    finally:
        for module, parameters, buffers in live:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _unwritten(plan: WorkerPlan) -> Iterator[str]:
    written = {route.param for route in plan.routes}
    params = (param for param in plan.params if not param.buffer)
    return (param.name for param in params if param.name not in written and param.spare < math.prod(param.shape))


def _watch(host: Host, tensors: Sequence[TensorMeta], live_owner: dict[str, str]) -> WorkerPlan:
    offered = [(meta.name, torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")) for meta in tensors]
    current: list[str] = []

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in offered:
            current[:] = [name]
            yield name, tensor

    with host.checkpoint_layout():
        watcher = _Watcher(host.model, dict(offered))
        try:
            with torch.no_grad(), watcher:
                host.load(feed())
        except InstepError:
            raise
        except Exception as error:
            name = current[0] if current else "the first tensor"
            shape = next((list(meta.shape) for meta in tensors if meta.name == name), "")
            raise PlanError(f"the engine's loader refuses {name} {shape}: {type(error).__name__}: {error}", tensor=name) from error
        return watcher.plan(host, live_owner)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows storages: those of parameters, those of checkpoint tensors, plain copies of the latter, and what is computed from them."""

    def __init__(self, model: torch.nn.Module, offered: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.params = {name: param.detach() for name, param in model.named_parameters()}
        self.buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
        self.targets = {_storage(tensor): name for name, tensor in (*self.buffers.items(), *self.params.items())}
        self.sources = {_storage(tensor): (name, None) for name, tensor in offered.items()}
        self.copies: dict[int, Origin] = {}
        self.made_of: dict[int, set[Origin]] = defaultdict(set)  # what is no copy
        self.alive: list[torch.Tensor] = list(offered.values())  # a freed storage's address could be given to another
        self.routes: list[Route] = []
        self.opaque: dict[str, str] = {}
        self.computed: dict[str, set[Region]] = defaultdict(set)
        self.feeds: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self._scalar, self._scalar_of = self._region(args[0]) or COMPUTED, self._origins(args[0])
            return 0.0
        first = _storage(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        target = self.targets.get(first) if first is not None else None
        if target is not None and func._schema.is_mutable:
            self._write(func, target, args, kwargs)
        result = func(*args, **kwargs)
        # Copies in another memory format are not followed: their elements lie in another order than those they were made of.
        if func in SAME_ELEMENTS and result.is_contiguous() and (found := self._region(args[0])) is not None:
            self.alive.append(result)
            self.copies[_storage(result)] = found
        elif func._schema.is_mutable or not (isinstance(result, torch.Tensor) and _storage(result) == first):  # no view
            self._note(self._origins(args, kwargs), result)
        return result

    def _note(self, origins: set[Origin], made: Any) -> None:
        for tensor in _tensors(made) if origins else ():
            storage = _storage(tensor)
            if storage not in self.sources and storage not in self.copies and storage not in self.targets:
                self.alive.append(tensor)
                self.made_of[storage] |= origins

    def _origins(self, *given: Any) -> set[Origin]:
        """The elements of checkpoint tensors that these are made of."""
        found: set[Origin] = set()
        for tensor in _tensors(given):
            if tensor.is_meta and (region := self._region(tensor)) is not None:
                found.add(region)
            elif (storage := _storage(tensor)) in self.copies:
                found.add(self.copies[storage])  # all of it: it cannot be told which
            else:
                found |= self.made_of.get(storage, set())
        return found

    def _write(self, func: Any, target: str, args: Any, kwargs: Any) -> None:
        where = _as_region(args[0])
        if func is aten.copy_.default or (func is aten.fill_.Tensor and where.numel == 1):
            found = self._region(args[1].expand(args[0].shape)) if isinstance(args[1], torch.Tensor) else None
            if found is None:
                self._compute(target, "the loader computes its values on the way", self._origins(args[1:], kwargs))
            else:
                self.routes.append(Route(found[0], found[1], target, where))
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            scalar, self._scalar = self._scalar, None
            if scalar is None:
                self.routes.append(Route(None, None, target, where))
            elif where.numel == 1 and scalar is not COMPUTED:
                self.routes.append(Route(scalar[0], Region(scalar[1].offset, where.shape, where.stride), target, where))
            else:
                self._compute(target, "the loader fills it from a scalar", self._scalar_of)
        else:
            self._compute(target, f"the loader updates it in place ({func.__name__})", self._origins(args[1:], kwargs))

    def _compute(self, target: str, why: str, origins: set[Origin]) -> None:
        self.opaque[target] = why
        for name, region in origins:
            self.computed[name].add(region)
            self.feeds[name].add(layer_of(target))

    _scalar: Origin | None = None
    _scalar_of: set[Origin] = set()  # noqa: RUF012

    def _region(self, tensor: torch.Tensor) -> tuple[str, Region] | None:
        """Which elements of which checkpoint tensor these are, or None."""
        storage = _storage(tensor)
        if storage in self.sources:
            return self.sources[storage][0], _as_region(tensor)
        if storage in self.copies:
            name, origin = self.copies[storage]
            flat = simplify(origin)
            if flat.stride in ((), (1,)):  # a view of a copy of a contiguous run is a view of the run
                return name, Region(origin.offset + int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
            if tensor.is_contiguous() and tuple(tensor.shape) == origin.shape:
                return name, origin
        return None

    def plan(self, host: Host, live_owner: dict[str, str]) -> WorkerPlan:
        written = {route.param for route in self.routes} | self.opaque.keys()
        params = []
        for name, tensor in self.params.items():
            spare, why = host.spare(name)
            if name not in written and live_owner.get(name, name) != name:
                spare, why = tensor.numel(), f"the same tensor as {live_owner[name]}"
            params.append(ParamMeta(name, layer_of(name), dtype_name(tensor.dtype), tuple(tensor.shape), spare, why))
        places: dict[tuple[type, str], bool] = {}  # one buffer stands for those of the same name in modules of one kind
        for name, buffer in self.buffers.items():
            module, leaf = host.model.get_submodule(layer_of(name)), name.rpartition(".")[2]
            if name not in written and leaf in module._non_persistent_buffers_set:
                continue
            spare, why = (0, None) if name in written else host.spare(name)
            if name not in written and not spare:
                if (type(module), leaf) not in places:
                    places[type(module), leaf] = _has_place(host, name, buffer)
                spare, why = (0, None) if places[type(module), leaf] else (buffer.numel(), NO_PLACE)
            params.append(ParamMeta(name, layer_of(name), dtype_name(buffer.dtype), tuple(buffer.shape), spare, why, buffer=True))
        reload_only = {layer_of(name): reason for name, reason in self.opaque.items()}
        computed = {name: sorted(regions, key=Region.__repr__) for name, regions in self.computed.items()}
        feeds = {name: sorted(layers) for name, layers in self.feeds.items()}
        return WorkerPlan(params, self.routes, reload_only, sorted(self.opaque), computed, feeds)


def _has_place(host: Host, name: str, buffer: torch.Tensor) -> bool:
    """Whether the loader would write a buffer, if it were given under this name."""
    watcher = _Watcher(host.model, offered := {name: torch.empty_like(buffer)})
    try:
        with torch.no_grad(), watcher:
            host.load(iter(offered.items()))
    except Exception:
        return False
    return name in {route.param for route in watcher.routes} | watcher.opaque.keys()


def layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _as_region(tensor: torch.Tensor) -> Region:
    return Region(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
