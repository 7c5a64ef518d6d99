"""A vLLM model in checkpoint layout: the tensors that its reload session would load into, before
the session runs.

vLLM remembers the layout of most tensors, and keeps some live in a session: those named in its own
lists, which differ from version to version. Here no tensor stays live, whatever its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from instep.receiver.layout import Layout, stand_in
from instep.receiver.watcher import layer_of, storage_of


@contextmanager
def laid_out(model: nn.Module) -> Iterator[Layout]:
    """Replaces all parameters and buffers by stand-ins with loaders of their own, while it
    lasts."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    layout = VllmLayout()
    made: dict[int, torch.Tensor] = {}
    with tensors_put_back(model.modules()):
        for name, layer in model.named_modules():
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for registry in (layer._parameters, layer._buffers):
                for leaf, tensor in registry.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = stand_in(tensor)
                            layout.watch(name, leaf, made[id(tensor)], live=not tensor.is_meta)
                        registry[leaf] = made[id(tensor)]
        yield layout


class VllmLayout(Layout):
    """Knows which writes a reload session of vLLM would notice.

    The session replaces each tensor's `weight_loader`, counts what that copies, and calls it once
    more on real memory when it has counted a layer's elements. What is written in another way goes
    to a shape-only tensor and is lost, except in tensors that stay live.
    """

    def __init__(self) -> None:
        self.layers: dict[int, str] = {}
        self.live: set[int] = set()
        self.loading: list[int] = []
        self.counted: set[str] = set()
        self.lost: set[str] = set()
        self.written: set[str] = set()

    def watch(self, layer: str, leaf: str, tensor: torch.Tensor, *, live: bool) -> None:
        """Watches the writes to a stand-in. live: whether the session leaves the real tensor in
        its place."""
        storage = storage_of(tensor)
        self.layers[storage] = layer
        if live:
            self.live.add(storage)
        if leaf in never_loaded():  # the session gives it no loader
            return
        own = loader_of(tensor)
        takes_param = "param" in inspect.signature(own).parameters

        @functools.wraps(own)
        def loader(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("param", args[0] if args else None)
            self.loading.append(storage if takes_param and given is tensor else 0)
            try:
                return own(*args, **kwargs)
            finally:
                self.loading.pop()

        tensor.weight_loader = loader  # type: ignore[attr-defined]

    def wrote(self, tensor: torch.Tensor, *, copied: bool) -> None:
        storage = storage_of(tensor)
        layer = self.layers[storage]
        if storage in self.live:
            return
        self.written.add(layer)
        if storage not in self.loading[-1:]:
            self.lost.add(layer)
        elif copied and tensor.numel():
            self.counted.add(layer)

    def replaced(self, param: str) -> None:
        self.lost.add(layer_of(param))

    def unnoticed(self) -> Collection[str]:
        return self.lost | (self.written - self.counted)


def loader_of(tensor: torch.Tensor) -> Callable[..., Any]:
    """Returns a tensor's own loader. A reload session may have left its wrapper around it, which
    drops tensors once the session is over."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader: Any = getattr(tensor, "weight_loader", default_weight_loader)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    found: Callable[..., Any] = loader
    return found


def never_loaded() -> Collection[str]:
    """Returns the names of tensors that vLLM's reload session does not wait for: expert maps,
    and tensors that it writes directly."""
    from vllm.model_executor.model_loader.reload import meta

    names: Collection[str] = getattr(meta, "SKIP_LOAD_TENSORS", None) or meta.SKIP_TENSORS
    return names


class tensors_put_back:
    """Puts the modules' parameters and buffers back as they were, the same objects in the same
    registries."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.saved = [(m, dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set)) for m in modules]

    def forget(self) -> None:
        self.saved = []

    def __enter__(self) -> tensors_put_back:
        return self

    def __exit__(self, *_: object) -> None:
        for module, parameters, buffers, non_persistent in self.saved:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(non_persistent)
