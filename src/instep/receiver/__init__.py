"""Receivers: the half of a push that runs inside an engine's worker, the same code for every engine.

    trace.py    runs the engine's own loader over shapes (layout.py), follows what it does (watcher.py) and says where each tensor goes
    apply.py    copies regions straight into live storage, or runs the engine's reload session; which layer takes which way, proved
    initial.py  whether a reload session leaves what the engine's initial load makes of the same bytes, compared place by place (alike.py)
    evidence.py what an engine derives from weights: two looks at all that its modules hold (memory.py), a rehearsal between them
    rebuilt.py  layers that the engine packs, made anew from copied regions
    regions.py  what is copied and compared: parts of tensors
    arrival.py  how a version's bytes come in: seen from here, pulled out of a GPU's memory (pull.py), passing by (stream.py, streamed.py)
    cuda_compare.py  whether live storage holds what routes bring, by sums
    readback.py what is in live storage, to compare with a checkpoint
    adapter.py  a LoRA adapter as a host of its own
    state.py    the nine calls (hello, trace, prepare, ready, commit, accept, abort, status, digest) and the state between them

An engine joins by giving its worker a `Host`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from instep.errors import PlanError
from instep.receiver.layout import Layout

Fill = Callable[[Mapping[str, torch.Tensor]], None]
"""Writes a layer's parameters, given by their names within the layer."""


class Fresh(Protocol):
    """A second model of an engine's, in scratch, into which nothing was loaded. Its weights take no memory
    until they are loaded."""

    @property
    def model(self) -> torch.nn.Module: ...

    def units(self) -> Iterable[Mapping[str, str]]:
        """Modules that are loaded together, by their names, each with its name in the live model. In order, all that both have."""

    def loading(self, unit: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> AbstractContextManager[None]:
        """Within it the modules of a unit are what the engine's initial load makes of these tensors: all that it reads for
        them. Once for each unit. Afterwards the memory is free."""

    def computes(self, layer: str) -> torch.Tensor:
        """As `Host.computes`, of a layer that is loaded, by its name in this model."""


class Host(Protocol):
    """What a receiver needs of the worker it runs in."""

    @property
    def model(self) -> torch.nn.Module: ...

    rank: int
    world_size: int
    device: str

    def checkpoint_layout(self) -> AbstractContextManager[Layout]:
        """Within it no parameter and no buffer is live: a stand-in (`layout.stand_in`) is in the place of each, in the layout that
        the loader expects. Afterwards the live tensors are back, the same objects as before."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's own loader, fed with checkpoint names."""

    def reload(self) -> AbstractContextManager[None]:
        """The engine's reload session: `load` within it replaces live weights, derived state is rebuilt at its end.
        It leaves no shape-only tensor behind, also when it ends with an exception."""

    def spare(self, parameter: str) -> tuple[int, str | None]:
        """How many elements of this parameter a loader need not write, and why; (0, None) where it must write all."""

    def rebuilds(self, layer: str) -> bool:
        """Whether `rebuild` makes all that the engine derives from this layer's weights."""

    def rebuild(self, layer: str, fill: Fill) -> None:
        """Lays out the layer's parameters and buffers as its loader would, has them filled, and derives from them what the engine
        keeps. Asked also of layers that a reload session leaves as they are, whatever `rebuilds` says."""

    def computes(self, layer: str) -> torch.Tensor:
        """What the layer makes of a fixed input: equal for equal weights and equal derived state."""

    @property
    def software(self) -> str:
        """The engine's software and its version, for people."""

    def fresh(self, fill: int) -> Fresh | None:
        """A second model. fill: the byte that its memory holds where nothing is loaded. None where a reload session is all that
        there is to an initial load."""

    def refresh(self) -> None:
        """To be called after the last `rebuild`: layers tied to a rebuilt one follow."""

    @property
    def always_reloads(self) -> str | None:
        """Why every layer takes the reload session on every push, whatever one shows; None where
        what a session shows decides."""

    def filled(self) -> Iterable[torch.Tensor]:
        """Tensors within reach of the model that generation fills, and loading does not: caches."""

    def adapter(self, number: int) -> Host:
        """The LoRA adapter that requests ask for by this number. Raises `PlanError` where the engine serves none."""


class NeverRebuilds:
    """The part of a `Host` that can only derive state in a reload session, which is as good as an initial load, and that has
    no caches in its modules."""

    always_reloads: str | None = None
    software: str = "the engine"

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


MERGED = "push the model with its adapter merged: WeightSync(source=model)"


class NoAdapters:
    """The part of a `Host` that serves no LoRA adapters."""

    def adapter(self, number: int) -> Host:  # noqa: ARG002
        raise PlanError("this engine serves no LoRA adapters", next_step=MERGED)
