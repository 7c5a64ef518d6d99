"""What direct layers read and where it goes, looked up once for as long as both stay: a commit has no time to search a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from instep.protocol import Route
from instep.receiver.regions import place


class Copies:
    """The copies of a worker's direct layers.

    routes: constants left out; their targets are in the parameters' memory (`regions.place`). others: checkpoint tensors that layers
    read which are not direct. live: the parameters that are written, by name.
    elsewhere: those of which routes cannot say where their elements lie.
    """

    def __init__(self, model: torch.nn.Module, layers: frozenset[str], routes: Sequence[Route], others: frozenset[str]) -> None:
        self.model, self.layers, self.others, self._asked = model, layers, others, routes
        params = dict.fromkeys(route.param for route in routes)
        live = dict(live_tensors(model))
        self.live = {name: live[name] for name in params}
        self.routes, self.elsewhere = self._placed()
        self._parents = [module._modules for module in model.modules() if module._modules]
        self._children = list(chain.from_iterable(map(dict.values, self._parents)))
        self._slots = [_slot(model, name) for name in params]
        self._addresses = self._now()
        self.worked_out: tuple[Hashable, Any] | None = None
        """What a transport has worked out for these copies from an address of its own."""

    def renewed(self, model: torch.nn.Module) -> Copies:
        """The same copies to where the parameters lie now: this object, for as long as they lie where they lay."""
        return self if self.stay(model) else Copies(model, self.layers, self._asked, self.others)

    def stay(self, model: torch.nn.Module) -> bool:
        """Whether the model has the same modules, and their parameters lie where they lay."""
        children = list(chain.from_iterable(map(dict.values, self._parents)))
        if model is not self.model or len(children) != len(self._children) or not all(map(is_, children, self._children)):
            return False
        return self._addresses == self._now()

    def _placed(self) -> tuple[list[Route], frozenset[str]]:
        routes, elsewhere = [], set()
        for route in self._asked:
            assert route.source is not None
            found = place(self.live[route.param], route.source, route.target)
            if found is None:
                elsewhere.add(route.param)
            routes.append(route if found is None else Route(route.tensor, found[0], route.param, found[1]))
        return routes, frozenset(elsewhere)

    def _now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are a class that intercepts every call: ten times slower
            return [tensor.data_ptr() if (tensor := registry.get(leaf)) is not None else 0 for registry, leaf in self._slots]


def _slot(model: torch.nn.Module, name: str) -> tuple[Mapping[str, torch.Tensor | None], str]:
    layer, _, leaf = name.rpartition(".")
    module = model.get_submodule(layer)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def live_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in model.named_parameters(remove_duplicate=False):
        yield name, param.detach()
    yield from model.named_buffers(remove_duplicate=False)
