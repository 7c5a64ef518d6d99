"""Follows what a loader does with tensors that have shapes and no bytes.

Three kinds of storage are known: those of the model's stand-ins, those of checkpoint tensors, and
those that the loader makes on the way. Nothing else is written: an operation that would change any
other memory, which may be in use, is refused before it runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from instep.errors import PlanError
from instep.plan.region import reshaped, run, simplify, whole
from instep.protocol import Region, Route
from instep.receiver.layout import Layout
from instep.receiver.nested import tensors_in

aten = torch.ops.aten
Origin = tuple[str, Region]
"""A region of a checkpoint tensor."""
COMPUTED = ("", Region(0, (), ()))  # a scalar that is no element of a checkpoint tensor
SAME_ELEMENTS = (aten.clone.default, aten._to_copy.default, aten.contiguous.default)
COPIES = (aten.copy_.default, aten._foreach_copy_.default)
NEW = (aten.lift_fresh.default, aten.lift.default)  # `torch.tensor` fills memory before the dispatcher sees it
EXPORTS = frozenset((torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__))
NOT_NAMED_YET = "#"  # prefix of a target whose parameter is not known yet
LIVE = (
    "no engine was touched, and no other source helps: the loader of this model changes memory that the engine generates "
    "from. Start the engine from each checkpoint anew, or have the loader write to parameters and buffers of the model"
)


class Watcher(TorchDispatchMode):
    """Records what happens to each parameter and buffer of a model in checkpoint layout.

    offered: the checkpoint tensors, on meta. live: what is known of storages in use, by address.
    loading: tells which tensor the loader has now.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        offered: Mapping[str, torch.Tensor],
        live: Mapping[int, str],
        loading: Callable[[], str],
        layout: Layout,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.live, self.loading, self.layout = model, live, loading, layout
        self.params = {name: param.detach() for name, param in model.named_parameters()}
        self.buffers = {name: buffer for name, buffer in model.named_buffers() if storage_of(buffer) not in live}
        tensors = (*self.buffers.items(), *self.params.items())
        self.targets = {storage_of(tensor): name for name, tensor in tensors if storage_of(tensor) not in live}
        self.sources = {storage_of(tensor): name for name, tensor in offered.items()}
        self.copies: dict[int, Origin] = {}
        self.zeros: set[int] = set()  # checkpoint tensors that the loader has filled with zeros
        self.made_of: dict[int, set[Origin]] = defaultdict(set)  # storages that are no plain copies
        self.made: set[int] = set()
        self.alive: list[torch.Tensor] = list(offered.values())  # a freed storage's address could be given to another
        self.routes: list[Route] = []
        self.constants: set[str] = set()  # filled, in part at least, with a number that is not zero
        self.opaque: dict[str, str] = {}
        self.made_from: dict[str, set[Origin]] = defaultdict(set)  # what opaque parameters are computed from
        self.overwritten: set[str] = set()
        self.refused: PlanError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self._scalar, self._scalar_of = self._region(args[0]) or COMPUTED, self._origins(args[0])
            return 0.0
        written = list(_written(func, args, kwargs)) if func._schema.is_mutable else []
        for tensor in written:
            self._check(func, tensor)
        if written and any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            self._adopt(written)
        targets = [tensor for tensor in written if storage_of(tensor) in self.targets]
        if targets:
            self._write(func, targets, args, kwargs)
        if any(not tensor.is_meta for tensor in targets):  # a stand-in with values keeps them
            return args[0] if isinstance(args[0], torch.Tensor) else None
        if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": args[0].device}  # there are no bytes to take elsewhere
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, written, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor], result: Any) -> None:
        for tensor in written:
            self.zeros.discard(storage_of(tensor))
            if storage_of(tensor) in self.sources or storage_of(tensor) in self.copies:
                self._overwrite(func, tensor, self._origins(args[1:], kwargs))
        made = [tensor for tensor in tensors_in(result) if not tensor.is_meta]
        if made:  # rarely: a loader makes hundreds of thousands of views of tensors without bytes
            given = set() if func in NEW else {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
            self.made |= {storage_of(tensor) for tensor in made} - given
        first = storage_of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        # Copies in another memory format are not followed: their elements lie in another order than
        # those they were made of.
        if func in SAME_ELEMENTS and result.is_contiguous() and (found := self._region(args[0])) is not None:
            self.alive.append(result)
            self.copies[storage_of(result)] = found
        elif func._schema.is_mutable or not (isinstance(result, torch.Tensor) and storage_of(result) == first):  # no view
            self._note(self._origins(args, kwargs), (result, written))

    def _check(self, func: Any, tensor: torch.Tensor) -> None:
        """Raises `PlanError` for a write to memory that is in use."""
        storage = storage_of(tensor)
        if tensor.is_meta or storage in self.targets or storage in self.made:
            return
        where = self.live.get(storage) or _place_of(self.model, storage) or "memory that is no module's attribute"
        name = self.loading()
        text = f"the engine's loader, given {name}, was stopped before it changed {where}, which may be in use, by {func.__name__}"
        self.refused = PlanError(text, tensor=name, next_step=LIVE)
        raise self.refused

    def _adopt(self, written: list[torch.Tensor]) -> None:
        """Treats the loader's own memory as a target once a tensor without bytes is written to it:
        it may become a parameter."""
        for tensor in written:
            storage = storage_of(tensor)
            if not tensor.is_meta and storage not in self.targets:
                self.alive.append(tensor)
                self.targets[storage] = f"{NOT_NAMED_YET}{storage}"

    def settle(self) -> None:
        """Resolves, after the loader is done, which parameters it has replaced.

        Raises `PlanError` for a parameter that the model did not have.
        """
        now = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters())}
        names = {storage_of(tensor): name for name, tensor in now.items()}
        named = {target: names.get(storage) for storage, target in self.targets.items() if target.startswith(NOT_NAMED_YET)}
        for name, tensor in now.items():
            held = self.params.get(name, self.buffers.get(name))
            if storage_of(tensor) in self.live or (held is not None and storage_of(tensor) == storage_of(held)):
                continue
            if held is None and name not in self.live.values():
                text = f"the engine's loader adds {name}, which the model that runs there has not"
                raise PlanError(text, next_step=f"no engine was touched: start the engine from a checkpoint that has {name}")
            (self.buffers if name in self.buffers else self.params)[name] = tensor.detach()
            if name not in named.values():
                self.targets[storage_of(tensor)] = name
                self.layout.replaced(name)
                if (found := self._region(tensor)) is None:
                    self._compute(tensor, "the loader puts another tensor in its place", self._origins(tensor))
                else:
                    self.routes.append(Route(*found, name, reshaped(whole(tensor.shape), found[1].shape) or whole(tensor.shape)))
        known = {target: named.get(target, target) or "" for target in self.targets.values()}
        self.routes = [Route(one.tensor, one.source, known[one.param], one.target) for one in self.routes if known[one.param]]
        self.opaque = {known[target]: why for target, why in self.opaque.items() if known[target]}
        self.constants = {known[target] for target in self.constants if known[target]}
        self.made_from = {known[target]: made for target, made in self.made_from.items() if known[target]}

    def _overwrite(self, func: Any, tensor: torch.Tensor, origins: set[Origin]) -> None:
        """Notes that a checkpoint tensor, or a copy of one, no longer holds its values."""
        storage = storage_of(tensor)
        if (name := self.sources.pop(storage, None)) is not None:
            self.overwritten.add(name)
            was: Origin = name, _as_region(next(one for one in self.alive if storage_of(one) == storage))
        else:
            was = self.copies.pop(storage)
        self.made_of[storage] |= {was} | origins
        if func is aten.zero_.default and tensor.numel() == was[1].numel:
            self.zeros.add(storage)

    def _note(self, origins: set[Origin], made: Any) -> None:
        for tensor in tensors_in(made) if origins else ():
            storage = storage_of(tensor)
            if storage not in self.sources and storage not in self.copies and storage not in self.targets:
                self.alive.append(tensor)
                self.made_of[storage] |= origins

    def _origins(self, *given: Any) -> set[Origin]:
        """Returns the regions of checkpoint tensors that the given tensors are made of."""
        found: set[Origin] = set()
        for tensor in tensors_in(given):
            if tensor.is_meta and (region := self._region(tensor)) is not None:
                found.add(region)
            elif (storage := storage_of(tensor)) in self.copies:
                found.add(self.copies[storage])  # all of the copy: the elements are not known
            else:
                found |= self.made_of.get(storage, set())
        return found

    def _write(self, func: Any, targets: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        for tensor in targets:
            if self.targets[storage_of(tensor)].startswith(NOT_NAMED_YET):
                self.made_of[storage_of(tensor)] |= self._origins(args, kwargs)
            else:
                self.layout.wrote(tensor, copied=func in COPIES)
        if func is aten._foreach_copy_.default:
            for tensor, value in zip(*args[:2], strict=True):
                if storage_of(tensor) in self.targets:
                    self._copy(tensor, value)
        elif func is aten.copy_.default or (func is aten.fill_.Tensor and args[0].numel() == 1):
            self._copy(args[0], args[1])
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            self._fill(args[0], args[1] if len(args) > 1 else 0)
        else:
            origins = self._origins([value for value in tensors_in((args, kwargs)) if storage_of(value) not in self.targets])
            for tensor in targets:
                self._compute(tensor, f"the loader updates it in place ({func.__name__})", origins)

    def _copy(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        target, where = self.targets[storage_of(tensor)], _as_region(tensor)
        if storage_of(value) in self.zeros:
            self.routes.append(Route(None, None, target, where))
        elif (found := self._region(value.expand(tensor.shape))) is None:
            self._compute(tensor, "the loader computes its values on the way", self._origins(value))
        elif (place := reshaped(where, found[1].shape)) is None:
            self._compute(tensor, "the loader brings its elements in another order", {found})
        else:
            self.routes.append(Route(found[0], found[1], target, place))

    def _fill(self, tensor: torch.Tensor, value: float) -> None:
        target, where = self.targets[storage_of(tensor)], _as_region(tensor)
        scalar, self._scalar = self._scalar, None
        if scalar is None:
            self.routes.append(Route(None, None, target, where))
            if value:
                self.constants.add(target)
        elif where.numel == 1 and scalar is not COMPUTED:
            self.routes.append(Route(scalar[0], Region(scalar[1].offset, where.shape, where.stride), target, where))
        else:
            self._compute(tensor, "the loader fills it from a scalar", self._scalar_of)

    def _compute(self, tensor: torch.Tensor, why: str, origins: set[Origin]) -> None:
        target = self.targets[storage_of(tensor)]
        self.opaque[target] = why
        self.made_from[target] |= origins

    _scalar: Origin | None = None
    _scalar_of: set[Origin] = set()  # noqa: RUF012

    def _region(self, tensor: torch.Tensor) -> Origin | None:
        """Returns the region of a checkpoint tensor that a tensor is, or None."""
        storage = storage_of(tensor)
        if storage in self.sources:
            return self.sources[storage], _as_region(tensor)
        if storage in self.copies:
            name, origin = self.copies[storage]
            flat = simplify(origin)
            if flat.stride in ((), (1,)):  # a view of a copy of a contiguous run is a view of the run
                return name, Region(origin.offset + int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
            rows = run(origin, int(tensor.storage_offset()), tensor.numel()) if tensor.is_contiguous() else None
            return (name, rows) if rows else None
        return None


class ReadOnly(TorchFunctionMode):
    """Hands out copies where a loader exports a tensor's memory, such as to NumPy: PyTorch does not
    see writes there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in EXPORTS and not args[0].is_meta:
            args = (args[0].detach().clone(), *args[1:])
        return func(*args, **kwargs) if kwargs else func(*args)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that an operation changes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            yield from tensors_in(value)


def _place_of(model: torch.nn.Module, storage: int) -> str | None:
    """Returns a module's attribute that holds a storage, directly or in lists and dicts."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if any(storage_of(tensor) == storage for tensor in tensors_in(value)):
                return f"{name}.{attribute}".lstrip(".")
    return None


def layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def storage_of(tensor: torch.Tensor) -> int:
    """Returns an identifier of a tensor's storage. Views share it, and it is valid while one of
    them lives."""
    return int(tensor.untyped_storage()._cdata)


def _as_region(tensor: torch.Tensor) -> Region:
    return Region(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
