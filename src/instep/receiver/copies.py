"""What direct layers read and where it goes, looked up once until a layer changes or moves: a
commit has no time to search a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from instep.protocol import Route
from instep.receiver.regions import place


class Copies:
    """The copies of some of a worker's layers.

    asked: the routes of these layers, constants left out. routes: the same, with targets in the
    parameters' memory (`regions.place`). every: the routes of all layers. others: checkpoint
    tensors that other layers read.
    live: the parameters that are written, by name.
    elsewhere: parameters whose layout no strides express. compared: layers that a reload session
    writes and that can be read back.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: frozenset[str],
        asked: Sequence[Route],
        every: Sequence[Route],
        *,
        others: frozenset[str] = frozenset(),
        compared: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.layers, self.asked, self.every = model, layers, asked, every
        self.others, self.compared = others, compared
        params = dict.fromkeys(route.param for route in asked)
        live = dict(live_tensors(model))
        self.live = {name: live[name] for name in params}
        self.routes, self.elsewhere = self._placed()
        self._parents = [module._modules for module in model.modules() if module._modules]
        self._children = list(chain.from_iterable(map(dict.values, self._parents)))
        self._slots = [_slot(model, name) for name in params]
        self._addresses = self._now()
        self.worked_out: tuple[Hashable, Any] | None = None
        """What a transport has worked out for these copies, with the address that it holds for."""

    def compares(self, route: Route) -> bool:
        """Whether a route leads to a layer that is compared."""
        return route.param.rpartition(".")[0] in self.compared

    def renewed(self, model: torch.nn.Module) -> Copies:
        """Returns the same copies for where the parameters lie now. It is this object if none has
        moved."""
        if self.stay(model):
            return self
        return Copies(model, self.layers, self.asked, self.every, others=self.others, compared=self.compared)

    def stay(self, model: torch.nn.Module) -> bool:
        """Whether the model has the same modules, and their parameters have not moved."""
        children = list(chain.from_iterable(map(dict.values, self._parents)))
        if model is not self.model or len(children) != len(self._children) or not all(map(is_, children, self._children)):
            return False
        return self._addresses == self._now()

    def _placed(self) -> tuple[list[Route], frozenset[str]]:
        routes, elsewhere = [], set()
        for route in self.asked:
            assert route.source is not None
            found = place(self.live[route.param], route.source, route.target)
            if found is None:
                elsewhere.add(route.param)
            routes.append(route if found is None else Route(route.tensor, found[0], route.param, found[1]))
        return routes, frozenset(elsewhere)

    def _now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameter class intercepts every call: ten times slower
            return [tensor.data_ptr() if (tensor := registry.get(leaf)) is not None else 0 for registry, leaf in self._slots]


def _slot(model: torch.nn.Module, name: str) -> tuple[Mapping[str, torch.Tensor | None], str]:
    layer, _, leaf = name.rpartition(".")
    module = model.get_submodule(layer)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def live_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in model.named_parameters(remove_duplicate=False):
        yield name, param.detach()
    yield from model.named_buffers(remove_duplicate=False)
