"""Runs vLLM's initial load on a second model, a few layers at a time. A reload session must give
the same result (see `receiver/initial.py`).

The model is built once more, as vLLM builds it, and large weights take no memory until their block
is loaded. What vLLM keeps by layer names while it builds a model goes to a configuration of its
own, so that the live model is not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from instep.engine.vllm.host import VllmModel
from instep.engine.vllm.repairs import refresh_tied

LARGE = {torch.empty: 1 << 12} | dict.fromkeys((torch.zeros, torch.ones, torch.full, torch.rand, torch.randn), 1 << 20)
"""Elements of what gets no memory. What is smaller has it at once: vLLM writes marks into some of
it before it loads."""

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class VllmFresh(VllmModel):
    """A second model of a vLLM worker. fill: the byte that fills memory before it is loaded."""

    def __init__(self, host: VllmModel, fill: int) -> None:
        self.live, self.device, self.fill, self.busy, self.views = host.model, host.device, fill, False, []
        self._loaded: Mapping[str, str] = {}
        self.worker = SimpleNamespace(vllm_config=_config(host.worker.vllm_config))
        self.model_config = host.worker.model_runner.model_config
        self._built = self._build()
        self._modules = dict(self._built.named_modules())
        self._with_lists = {id(one) for one in self._built.modules() if any(isinstance(below, LISTS) for below in one.modules())}

    @property
    def model(self) -> nn.Module:
        return self._built

    def _build(self) -> nn.Module:
        from vllm.model_executor.model_loader.utils import initialize_model

        device = torch.device(self.device)
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            stack.enter_context(self._context())
            stack.enter_context(device)
            stack.enter_context(_Weightless(self.fill))
            built: nn.Module = initialize_model(vllm_config=self.worker.vllm_config, model_config=self.model_config)
        return built.eval()

    def units(self) -> Iterator[dict[str, str]]:
        """Yields groups of modules that are loaded together. The modules of one block in a list
        refer to each other, so they form a unit. Blocks that share a weight do too."""
        known_as = {_unwrapped(name): name for name, _ in self.live.named_modules()}  # one with an adapter comes after what wraps it
        groups: dict[str, dict[str, str]] = {}
        moved: dict[str, str] = {}
        first: dict[int, str] = {}  # group of each weight
        for name, module in self.model.named_modules():
            block = self._block(name)
            group = moved.get(block, block)
            for weight in module._parameters.values():
                if weight is not None and (other := first.setdefault(id(weight), group)) != group:
                    groups[other] |= groups.pop(group, {})
                    moved |= dict.fromkeys((block, *(one for one, to in moved.items() if to == group)), other)
                    first = {key: other if to == group else to for key, to in first.items()}
                    group = other
            lives = self.live.get_submodule(known_as[name]) if name in known_as else None
            if type(lives) is type(module) and lives is not module:  # models share a module of rotary embeddings
                groups.setdefault(group, {})[name] = known_as[name]
        yield from groups.values()

    def _block(self, name: str) -> str:
        """Returns the outermost list element, or the outermost module without lists in it, to
        which a module belongs. A module that holds lists belongs to itself."""
        module, parts = self.model, name.split(".") if name else []
        for at, part in enumerate(parts, 1):
            in_list, module = isinstance(module, LISTS), module.get_submodule(part)
            if in_list or id(module) not in self._with_lists:
                return ".".join(parts[:at])
        return name

    @contextmanager
    def loading(self, unit: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        self._loaded = unit
        before = [_Before(self._modules[name], self.live.get_submodule(known_as)) for name, known_as in unit.items()]
        try:
            with self._context():
                self._materialise(unit)
                self.model.load_weights(tensors)  # type: ignore[operator]
                alone = self._alone(unit)
                _finish_online(alone, self.model_config)
                process_weights_after_loading(alone, self.model_config, torch.device(self.device))
            yield
        finally:
            for one in before:
                one.restore()

    def refresh(self) -> None:
        with self._context():
            refresh_tied(self._modules[name] for name in self._loaded)

    def _alone(self, unit: Mapping[str, str]) -> nn.Module:
        """Returns a model with only this unit's blocks. A module with blocks below it is none,
        and has no weights to process."""
        blocks = {block for block in map(self._block, unit) if self._in_list(block) or id(self._modules[block]) not in self._with_lists}
        alone = nn.Module()
        alone.blocks = nn.ModuleList(self._modules[block] for block in sorted(blocks))
        return alone

    def _in_list(self, name: str) -> bool:
        return bool(name) and isinstance(self._modules[name.rpartition(".")[0]], LISTS)

    def _materialise(self, unit: Mapping[str, str]) -> None:
        """Allocates memory for a unit's weights, except for modules whose memory vLLM allocates
        while it loads."""
        made: dict[int, torch.Tensor] = {}
        for name, known_as in unit.items():
            module, live = self._modules[name], self.live.get_submodule(known_as)
            if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
                continue
            attributes: Any = vars(module)
            places: tuple[tuple[dict[str, Any], Any], ...]
            places = (module._parameters, None), (module._buffers, live._buffers), (attributes, vars(live))
            for registry, lived in places:
                for leaf, tensor in list(registry.items()):
                    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                        if id(tensor) not in made:
                            made[id(tensor)] = self._memory(tensor, lived.get(leaf) if lived else None)
                        registry[leaf] = made[id(tensor)]

    def _memory(self, meta: torch.Tensor, like: Any) -> torch.Tensor:
        """Allocates one tensor. like: the live model's tensor in this place, copied because no
        checkpoint has it."""
        tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=self.device)
        if isinstance(like, torch.Tensor) and (like.shape, like.dtype) == (meta.shape, meta.dtype):
            tensor.copy_(like)
        else:
            tensor.untyped_storage().fill_(self.fill)  # type: ignore[attr-defined]
        tensor.__class__ = meta.__class__
        tensor.__dict__ = meta.__dict__.copy()
        return tensor


class _Before:
    """Saves a module of a second model, and the vLLM objects that only it holds, before a load."""

    def __init__(self, module: nn.Module, live: nn.Module) -> None:
        held = (value for name, value in vars(module).items() if value is not vars(live).get(name))
        own = (value for value in held if hasattr(value, "__dict__") and not isinstance(value, type | nn.Module))
        objects = [module, *(value for value in own if type(value).__module__.partition(".")[0] == "vllm")]
        self.attributes = [(one, dict(vars(one))) for one in objects]
        registries: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        self.registries = [(one, dict(one)) for one in registries]

    def restore(self) -> None:
        """Drops what was loaded and derived."""
        for one, attributes in self.attributes:
            vars(one).clear()
            vars(one).update(attributes)
        for registry, tensors in self.registries:
            registry.clear()
            registry.update(tensors)


class _Weightless(TorchFunctionMode):
    """Gives large tensors a shape and no memory, and fills the memory of others with one byte."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.fill = fill

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in LARGE or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        shape = func(*args, **{**kwargs, "device": "meta"})
        if shape.numel() >= LARGE[func]:
            return shape
        made = func(*args, **kwargs)
        if func is torch.empty and not made.is_meta:
            made.untyped_storage().fill_(self.fill)
        return made


def _config(live: Any) -> Any:
    """Returns a copy of a worker's configuration without the entries by layer name, and without
    compilation."""
    from vllm.config import CompilationMode, VllmConfig

    config = copy(live)
    compilation = copy(config.compilation_config)
    vars(compilation).update(static_forward_context={}, static_all_moe_layers=[], mode=CompilationMode.NONE)
    vars(config)["compilation_config"] = compilation
    if config.quant_config is not None:  # building a model renames the layers that it lists
        vars(config)["quant_config"] = VllmConfig.get_quantization_config(config.model_config, config.load_config)
    return config


def _finish_online(model: nn.Module, model_config: Any) -> None:
    """Finishes a model that vLLM quantises while it loads, as vLLM's initial load does."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

    if any(getattr(getattr(module, "quant_method", None), "uses_meta_device", False) for module in model.modules()):
        finalize_layerwise_processing(model, model_config)


def _unwrapped(name: str) -> str:
    """Returns a module's name without the wrappers that vLLM puts around layers that take
    adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")
