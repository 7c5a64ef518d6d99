"""A LoRA adapter as a host of its own: tensors under the names that peft saves, in a room beside
the model.

A commit fills the room, and at its end the engine takes all of it at once in the place of the
adapter that it had. So every layer goes through the reload session on each push; an adapter has a
few megabytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from instep.errors import PlanError
from instep.protocol import TensorMeta
from instep.receiver import PlainHost


class AdapterHost(PlainHost, ABC):
    """Serves one LoRA adapter, whole on each worker. rank, world_size, device: those of the
    worker."""

    always_reloads = "the engine takes an adapter as a whole"

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.model = nn.Module()
        self.config = ""
        self.names: dict[str, str] = {}  # tensors by the model's parameters

    @abstractmethod
    def check(self, tensors: Mapping[str, torch.Tensor], config: str) -> None:
        """Raises `PlanError` unless the engine can serve an adapter of tensors with these names,
        shapes and dtypes. All values are zero."""

    @abstractmethod
    def install(self, tensors: Mapping[str, torch.Tensor], config: str) -> None:
        """Has the engine serve this adapter from now on. The tensors are in host memory, and the
        engine may keep them."""

    def expect(self, tensors: Sequence[TensorMeta], config: str) -> None:
        """Makes room for these tensors. The adapter that is served does not change. config: as peft
        saves it."""
        zeros = {meta.name: torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in tensors}
        self.check(zeros, config)
        self.model, self.config = nn.Module(), config
        self.names = {slot(name): name for name in zeros}
        for name, tensor in zeros.items():
            register(self.model, slot(name), nn.Parameter(tensor.to(self.device), requires_grad=False))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.model.get_parameter(slot(name)).detach().copy_(tensor)

    @contextmanager
    def reload(self) -> Iterator[None]:
        yield
        tensors = {self.names[name]: param.detach().clone().cpu() for name, param in self.model.named_parameters()}
        self.install(tensors, self.config)


ALONE = "push the base weights alone: `with model.disable_adapter(): sync.push(...)`"


def check_base(merged: bool, method: str) -> None:
    """Raises `PlanError` where a call would commit an adapter beside base weights that have one
    merged into them."""
    if merged and method in ("trace", "prepare", "commit"):
        raise PlanError(
            "the engine's base weights have an adapter merged into them: with this one they would get it twice", next_step=ALONE
        )


def check_merged(merged: bool, served: Sequence[int]) -> None:
    """Raises `PlanError` where base weights with a merged adapter are to be committed beside
    adapters.

    served: numbers of the adapters that were pushed and are served.
    """
    if merged and served:
        raise PlanError(
            f"an adapter is merged into these weights, and the engine serves adapter {served[0]} beside them: "
            "requests that ask for the adapter would get it twice",
            next_step=f"{ALONE}, or start an engine of its own for the merged weights",
        )


_BARE = nn.Module()


def slot(name: str) -> str:
    """Returns a parameter's name for a tensor of any name, usually the same one. A part that is
    empty, or an attribute of every module such as `forward`, has `~` before it."""
    parts = name.split(".")
    return ".".join(f"~{part}" if part.startswith("~") or not part or hasattr(_BARE, part) else part for part in parts)


def register(model: nn.Module, name: str, param: nn.Parameter) -> None:
    """Adds a parameter whose name may have dots, and the modules on the way to it."""
    *path, leaf = name.split(".")
    module = model
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, param)
