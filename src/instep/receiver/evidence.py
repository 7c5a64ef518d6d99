"""Everything that the modules of a model hold beside the weights of a plan.

A look walks from each module through attributes, containers, objects, closures, classes and
attributes of tensors, to any depth, and sums up the memory of every tensor that it meets, all of
it. It stops at other modules of the model, which are walked under their own names, and at classes
and objects of the standard library and of PyTorch. What only a global variable leads to is not
seen.

Two looks tell what an engine derives from weights, if it loaded different weights before each.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator
from enum import Enum
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from instep.receiver.memory import Memory, extent

Place = tuple[str, str]
"""A module's name, and the attribute path from there."""

PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)
LEAVES = (ModuleType, Enum, PurePath, torch.Generator)
BOUND = (MethodType, BuiltinMethodType, MethodWrapperType)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
FOLLOWED = (SimpleNamespace, functools.partial, nn.Module)
UNFOLLOWED = sys.stdlib_module_names | {"torch", "instep"}


class Held(NamedTuple):
    """A tensor: its layout, and the index of its memory's sum."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    slot: int


class Same:
    """An object that is compared by identity. It is held by a weak reference if possible, because
    it may hold a layer's packed weights."""

    def __init__(self, value: object) -> None:
        try:
            self.get = weakref.ref(value)
        except TypeError:
            self.get = lambda: value  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.get() is not None and self.get() is other.get()

    __hash__ = None  # type: ignore[assignment]


class Holdings:
    """What a model's modules hold at this moment.

    spared: tensors whose memory, and that of their views, is not summed up: the weights of the
    plan, and what generation fills.
    """

    def __init__(self, model: nn.Module, spared: Iterable[torch.Tensor]) -> None:
        self.found: dict[Place, object] = {}
        self.holders: dict[Place, list[Place]] = defaultdict(list)
        self._seen: dict[int, Place] = {}
        self._alive: list[object] = []  # so that no two objects of one look have one id
        self._memory = Memory(spared)
        self._modules = {id(module): name for name, module in model.named_modules()}
        with torch._C.DisableTorchFunctionSubclass():
            for name, module in model.named_modules():
                self._walk([(child, (name, way), (name, "")) for way, child in of_module(module)])
        self.sums = self._memory.sums()
        self._alive.clear()
        self._seen.clear()

    def changed(self, before: Holdings) -> dict[str, list[Place]]:
        """Returns the modules that hold, or lead to, something that has changed, each with the
        places of such things."""
        found: dict[str, list[Place]] = defaultdict(list)
        for place in {**self.found, **before.found}:
            if not self.as_it_was(before, place):
                for module in self.owners(place) | before.owners(place):
                    found[module].append(place)
        return found

    def followed(self, before: Holdings, place: Place) -> bool:
        """Whether something derived from weights has changed with them. A tensor of one 64-bit
        integer counts as changed: it may be an address, and the allocator may give the same memory
        again."""
        now = self.found.get(place)
        address = isinstance(now, Held) and now.dtype is torch.int64 and not now.shape
        return address or not self.as_it_was(before, place)

    def owners(self, place: Place) -> set[str]:
        """Returns the modules from which a place can be reached."""
        seen, left = {place}, [place]
        while left:
            for holder in self.holders.get(left.pop(), ()):
                if holder not in seen:
                    seen.add(holder)
                    left.append(holder)
        return {module for module, way in seen if not way}

    def as_it_was(self, before: Holdings, place: Place) -> bool:
        if place not in self.found or place not in before.found:
            return False
        now, was = self.found[place], before.found[place]
        if isinstance(now, Held) and isinstance(was, Held):
            return now[:3] == was[:3] and self.sums[now.slot] == before.sums[was.slot]
        return type(now) is type(was) and now == was

    def _walk(self, left: list[tuple[object, Place, Place]]) -> None:
        while left:
            value, place, holder = left.pop()
            self.holders[place].append(holder)
            if type(value) in PLAIN:  # most of them, and they lead nowhere
                self.found[place] = value
                continue
            if (known := self._seen.get(id(value))) is not None:
                self.holders[known].append(place)
                self.found[place] = known
                continue
            self.found[place] = self._what(value)
            try:
                found = list(children(value, self._modules))
            except Exception:  # an object that cannot be looked into is compared as such
                found = []
            if found:
                self._seen[id(value)] = place
                self._alive.append(value)
                left += [(child, (place[0], place[1] + way), place) for way, child in found]

    def _what(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, float | complex | np.generic):
            return repr(value)  # so that a NaN equals itself
        if type(value) in PLAIN:
            return value
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, xxhash.xxh3_64_intdigest(np.ascontiguousarray(value).tobytes())
        if isinstance(value, CONTAINERS):
            return (type(value).__name__, _plain(value)) if is_plain(value) else type(value).__name__
        if isinstance(value, BOUND):
            return value.__name__  # each access makes a new object: its `__self__` is compared instead
        return self._modules.get(id(value)) or Same(value)

    def _of_tensor(self, tensor: torch.Tensor) -> object:
        if is_wrapper(tensor) or tensor.is_meta:
            return tensor.dtype, tuple(tensor.shape)
        if tensor.layout is not torch.strided:
            dense = tensor.to_dense()
            self._alive.append(dense)
            tensor = dense
        found = extent(tensor)
        if found is None or self._memory.is_spared(tensor, found):
            return tensor.dtype, tuple(tensor.shape), tensor.stride()
        return Held(tensor.dtype, tuple(tensor.shape), tensor.stride(), self._memory.slot(tensor, found))


def children(value: Any, modules: Container[int]) -> Iterator[tuple[str, object]]:
    """Yields what a value leads to, each with the attribute path. modules: ids of those at which a
    walk stops."""
    if isinstance(value, torch.Tensor):
        if is_wrapper(value):
            yield from ((f".{name}", getattr(value, name)) for name in _inner(value))
        yield from ((f".{name}", child) for name, child in vars(value).items())
    elif isinstance(value, CONTAINERS):
        if not is_plain(value):
            yield from _items(value)
        if type(value) not in CONTAINERS:
            yield from ((f".{name}", child) for name, child in _attributes(value))
    elif isinstance(value, BOUND):
        yield from ((".__self__", value.__self__), (".__func__", getattr(value, "__func__", None)))
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((f".{name}", child) for child in _content(cell))
        yield from ((f".{name}", child) for name, child in vars(value).items())
        yield from ((".defaults", value.__defaults__), (".keywords", value.__kwdefaults__))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, type):
        if is_followed(value):
            yield from ((f".{name}", child) for name, child in vars(value).items() if not name.startswith("__"))
            yield from ((f".{base.__name__}", base) for base in value.__bases__)
    elif id(value) not in modules and is_followed(value):
        yield from ((f".{name}", child) for name, child in _attributes(value))
        yield ".__class__", type(value)


def of_module(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            yield from value.items()
        elif name != "_modules":
            yield name, value
    yield "__class__", type(module)


def _items(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]" if type(key) in PLAIN else f"[{at}]", item) for at, (key, item) in enumerate(dict.items(value)))
    else:
        items = sorted(value, key=id) if isinstance(value, set | frozenset) else value
        yield from ((f"[{at}]", item) for at, item in enumerate(items))


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is a wrapper subclass around other tensors, which have the memory."""
    return is_traceable_wrapper_subclass(tensor)


def _inner(tensor: Any) -> list[str]:
    names: list[str] = tensor.__tensor_flatten__()[0]
    return names


def is_followed(value: object) -> bool:
    """Whether an object may hold tensors and is of a class that is neither the standard library's
    nor PyTorch's."""
    if isinstance(value, (*PLAIN, float, complex, np.generic, np.ndarray, *LEAVES)):
        return False
    kind = value if isinstance(value, type) else type(value)
    return isinstance(value, FOLLOWED) or str(kind.__module__).partition(".")[0] not in UNFOLLOWED


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            name = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _content(cell: Any) -> Iterator[object]:
    try:
        yield cell.cell_contents
    except ValueError:  # an empty cell
        return


def is_plain(value: Any) -> bool:
    items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return all(type(item) in PLAIN or type(item) is float for item in items)


def _plain(value: Any) -> str:
    """Returns a container of numbers and text as text. Sets are sorted first."""
    return repr(sorted(map(repr, value))) if isinstance(value, set | frozenset) else repr(value)
