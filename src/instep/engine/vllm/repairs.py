"""Repairs around vLLM's reload session. They depend on the state of a layer, never on a model's
name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from instep.engine.vllm.layout import never_loaded
from instep.receiver import Fill
from instep.receiver.watcher import storage_of


def forget_expert_kernels(model: nn.Module) -> None:
    """Makes each expert layer set up its kernel again when it is loaded.

    On the CPU the kernel expects packed weights, and vLLM packs them only while it sets the kernel
    up: its own reload leaves them unpacked, and the layer computes nonsense. On a GPU the kernel
    stays, as CUDA graphs may have captured it.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def name_loaders(layer: nn.Module) -> None:
    """Names each loader that has no name: vLLM's session asks for the name, and
    `functools.partial` has none."""
    kept = (tensor for tensors in get_info(layer).restore_metadata for tensor in tensors.values())
    for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False), *kept):
        loader = getattr(tensor, "weight_loader", None)
        if loader is not None and not hasattr(loader, "__name__"):
            loader.__name__ = type(loader).__name__


def allow_other_tensors(layer: nn.Module, info: Any) -> None:
    """Lets a session end for a layer whose live parameters are not those that vLLM remembers.
    Copying into them would fail.

    Some layers read another layer's weight once, pack it, and leave an empty one there. Some
    loaders register a parameter when a checkpoint turns out to have it, and do so again in each
    session.
    """
    if info.kernel_tensors is None:
        return
    parameters, buffers = info.kernel_tensors
    if any(param.numel() == 0 or name not in layer._parameters for name, param in parameters.items()):
        info.kernel_tensors = (Fitting(layer, parameters), buffers)


class Fitting(dict[str, nn.Parameter]):
    """A layer's parameters before a session. The session reads them when it copies, and when it
    puts them back.

    An empty one is replaced by what the layer has in its place by then, and one of which the
    session has made nothing is not copied into.
    """

    def __init__(self, layer: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self.layer = layer

    def items(self) -> Any:
        made = {name: param for name, param in self.layer._parameters.items() if param is not None}  # none when they are put back
        for name, param in super().items():
            new = made.get(name)
            if new is not None and not new.is_meta and new.numel() and not param.numel():
                self[name] = new
        return [(name, param) for name, param in super().items() if name in made or not made]


class View(NamedTuple):
    """A buffer that was a view of a layer's parameter when the model was built, and is none any
    more."""

    buffer: torch.Tensor
    layer: Any
    leaf: str


def parted_views(model: nn.Module) -> list[View]:
    """Returns the buffers that are such views. vLLM does not remember them as tensors to load,
    since loading the parameter filled them.

    Packing gives a parameter other memory. Which one it was follows from the number of elements;
    where several have as many, none is taken.
    """
    found = []
    for module in model.modules():
        remembered = get_info(module).restore_metadata[1]
        for name in module._non_persistent_buffers_set - remembered.keys() - {*never_loaded()}:
            buffer = module._buffers.get(name)
            if buffer is None or not buffer.dtype.is_floating_point:
                continue
            if any(storage_of(param) == storage_of(buffer) for param in module.parameters() if not param.is_meta):
                continue
            like = [
                View(buffer, layer, leaf)
                for layer in module.modules()
                for leaf, param in get_info(layer).restore_metadata[0].items()
                if (param.numel(), param.dtype) == (buffer.numel(), buffer.dtype)
            ]
            found += like if len(like) == 1 else []
    return found


@contextmanager
def views_follow(views: Iterable[View]) -> Iterator[None]:
    """Copies each parameter into its view before vLLM packs the parameter, while it lasts. The
    first load filled the views in the same way."""
    methods = []
    try:
        for view in views:
            if (method := getattr(view.layer, "quant_method", None)) is not None:
                vars(method)["process_weights_after_loading"] = _first_to(view, method.process_weights_after_loading)
                methods.append(method)
        yield
    finally:
        for method in methods:
            vars(method).pop("process_weights_after_loading", None)


def _first_to(view: View, process: Callable[[nn.Module], object]) -> Callable[[nn.Module], object]:
    def processed(layer: nn.Module) -> object:
        loaded = layer._parameters.get(view.leaf)
        if layer is view.layer and loaded is not None and loaded.numel() == view.buffer.numel():
            view.buffer.copy_(loaded.detach().reshape(view.buffer.shape))
        return process(layer)

    return processed


def get_info(layer: nn.Module) -> Any:
    """Returns what vLLM remembers of a layer for its reload."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer)


def remake(layer: Any, fill: Fill) -> None:
    """Makes a layer's tensors in the layout that its loader expects, and has them filled.
    Derives from them what vLLM keeps, and copies the result into the live tensors.

    Buffers are filled where they are. The caller puts the live tensors back.
    """
    from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta

    info = get_info(layer)
    live, buffers = dict(layer._parameters), dict(layer._buffers)
    restore_layer_on_meta(layer, info)
    layer._buffers.update({name: one for name, one in buffers.items() if one is not None and _fits(one, layer._buffers.get(name))})
    materialize_layer(layer, info)
    fill({**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))})
    vars(layer).pop("_already_called_process_weights_after_loading", None)
    method = getattr(layer, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(layer)
    for name, param in live.items():
        if param is not None and param is not layer._parameters[name]:
            param.data.copy_(layer._parameters[name])


def _fits(buffer: torch.Tensor, expected: torch.Tensor | None) -> bool:
    return expected is None or (buffer.shape, buffer.dtype) == (expected.shape, expected.dtype)


def refresh_tied(layers: Iterable[nn.Module]) -> None:
    """Makes those layers that share another layer's tensor process it again.

    vLLM's reload handles a tied tensor through one of its layers; on the CPU the other (lm_head)
    keeps a packed copy of the old weights.
    """
    first: dict[int, torch.nn.Module] = {}
    for layer in layers:
        weight = layer._parameters.get("weight")
        if weight is None or first.setdefault(id(weight), layer) is layer:
            continue
        method = getattr(layer, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer)
