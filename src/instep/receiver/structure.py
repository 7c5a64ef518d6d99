"""Which objects an engine's model is made of: what was proved of layers holds as long as they are
the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from instep.receiver.evidence import is_followed


class Structure:
    """The modules of a model, and the objects that some layers hold.

    layers: the layers whose objects count, each with the paths of attributes to skip.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, Iterable[str]]) -> None:
        self.model, self.modules = model, dict(model.named_modules())
        self.layers = {layer: frozenset(map(_first, ways)) for layer, ways in layers.items()}
        self.objects = {layer: self._objects(layer) for layer in layers}

    def stays(self, model: nn.Module) -> bool:
        """Whether modules and objects are still the same."""
        if model is not self.model or not _same(self.modules, dict(model.named_modules())):
            return False
        return all(_same(objects, self._objects(layer)) for layer, objects in self.objects.items())

    def _objects(self, layer: str) -> dict[str, object]:
        held = vars(self.modules[layer])
        return {name: value for name, value in held.items() if name not in self.layers[layer] and is_followed(value)}


def _same(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    return before.keys() == now.keys() and all(now[name] is value for name, value in before.items())


def _first(way: str) -> str:
    """Returns the first attribute of a path."""
    return way.partition(".")[0].partition("[")[0]
