"""Receivers: the half of a push that runs inside an engine's worker, the same code for every
engine.

    trace.py    runs the engine's own loader over shapes (layout.py), follows what it does (watcher.py) and says where each tensor goes
    beforehand.py  which layers need no reload session, found in scratch memory while the engine generates
    apply.py    copies regions into live storage, or runs the engine's reload session; which layer takes which way (ways.py), proved
    initial.py  whether a reload session leaves what the engine's initial load makes of the same bytes, compared place by place (alike.py)
    evidence.py what an engine derives from weights: two looks at all that its modules hold (memory.py), a rehearsal between them
    rebuilt.py  layers that the engine packs, made anew from copied regions
    regions.py  what is copied and compared: parts of tensors
    arrival.py  how a version's bytes come in: seen from here, pulled out of a GPU's memory (pull.py), passing by (stream.py, streamed.py)
    cuda_compare.py  whether live storage holds what routes bring, by sums
    readback.py what is in live storage, to compare with a checkpoint
    adapter.py  a LoRA adapter as a host of its own
    state.py    the calls (`protocol.Method`), and the state between them

An engine joins by giving its worker a `Host`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from instep.errors import PlanError
from instep.receiver.layout import Layout, shape_only

Fill = Callable[[Mapping[str, torch.Tensor]], None]
"""Writes a layer's parameters, given by their names within the layer."""


class Fresh(Protocol):
    """A second model of the engine's, in scratch memory, into which nothing was loaded. Its weights
    take no memory until they are loaded."""

    @property
    def model(self) -> torch.nn.Module: ...

    def units(self) -> Iterable[Mapping[str, str]]:
        """Yields groups of modules that are loaded together. A group maps each module's name in
        this model to its name in the live model. Groups come in order and cover all modules that
        both models have."""

    def loading(self, unit: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> AbstractContextManager[None]:
        """Loads the modules of a unit as the engine's initial load does, from `tensors`, which are
        all that the load reads. The loaded weights exist within the block; afterwards their memory
        is free. Used once for each unit."""

    def computes(self, layer: str) -> torch.Tensor:
        """Returns what `Host.computes` returns, for a loaded layer of this model."""

    def rebuild(self, layer: str, fill: Fill) -> None:
        """Does what `Host.rebuild` does, to a loaded layer of this model."""

    def refresh(self) -> None:
        """Does what `Host.refresh` does, to the layers that are loaded."""


class Host(Protocol):
    """What a receiver needs of the worker it runs in."""

    @property
    def model(self) -> torch.nn.Module: ...

    rank: int
    world_size: int
    device: str

    def checkpoint_layout(self) -> AbstractContextManager[Layout]:
        """Puts a stand-in (`layout.stand_in`) in the place of each parameter and buffer, in the
        layout that the loader expects. After the block the live tensors are back, the same objects
        as before."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Runs the engine's own loader on tensors with checkpoint names."""

    def reload(self) -> AbstractContextManager[None]:
        """Opens the engine's reload session. `load` within it replaces live weights, and the end of
        the session rebuilds derived state. The session leaves no tensor on the meta device behind,
        even if it ends with an exception."""

    def spare(self, parameter: str) -> tuple[int, str | None]:
        """Returns how many elements of a parameter the loader need not write, and why; (0, None)
        where it must write all."""

    def rebuilds(self, layer: str) -> bool:
        """Whether `rebuild` makes all that the engine derives from this layer's weights."""

    def rebuild(self, layer: str, fill: Fill) -> None:
        """Lays out the layer's parameters and buffers as its loader would, calls `fill`, and
        derives what the engine keeps from them. Also called for layers that a reload session leaves
        as they are, whatever `rebuilds` says."""

    def computes(self, layer: str) -> torch.Tensor:
        """Returns the layer's output for a fixed input. Equal weights and equal derived state give
        equal outputs."""

    @property
    def software(self) -> str:
        """The engine's software and its version, as text for people."""

    decides_beforehand: bool
    """Whether second models may be loaded, a few layers at a time, while the engine generates."""

    def fresh(self, fill: int) -> Fresh | None:
        """Makes a second model. fill: the byte value of its memory before anything is loaded.
        Returns None where a reload session does all that an initial load does."""

    def refresh(self) -> None:
        """Updates layers that are tied to a rebuilt one. Call it after the last `rebuild`."""

    @property
    def always_reloads(self) -> str | None:
        """Why every layer takes the reload session on every push, whatever a session shows. None
        where the comparison after a session decides for each layer."""

    def filled(self) -> Iterable[torch.Tensor]:
        """Yields the tensors of the model that generation fills and loading does not: caches."""

    def adapter(self, number: int) -> Host:
        """Returns the host of the LoRA adapter that requests name by this number. Raises
        `PlanError` where the engine serves no adapters."""


MERGED = "push the model with its adapter merged: WeightSync(source=model)"


class PlainHost:
    """Base of a `Host` that keeps its tensors as its loader takes them, and derives state in a
    reload session alone. Its session is as good as an initial load, its modules hold no caches, and
    it serves no adapters."""

    model: torch.nn.Module
    always_reloads: str | None = None
    decides_beforehand = False
    software: str = "the engine"

    def checkpoint_layout(self) -> AbstractContextManager[Layout]:
        return shape_only(self.model)

    def spare(self, parameter: str) -> tuple[int, str | None]:  # noqa: ARG002
        return 0, None

    def adapter(self, number: int) -> Host:  # noqa: ARG002
        raise PlanError("this engine serves no LoRA adapters", next_step=MERGED)

    def fresh(self, fill: int) -> Fresh | None:  # noqa: ARG002
        return None

    def filled(self) -> Iterable[torch.Tensor]:
        return ()

    def rebuilds(self, layer: str) -> bool:  # noqa: ARG002
        return False

    def rebuild(self, layer: str, fill: Fill) -> None:
        raise NotImplementedError

    def computes(self, layer: str) -> torch.Tensor:
        raise NotImplementedError

    def refresh(self) -> None:
        raise NotImplementedError
