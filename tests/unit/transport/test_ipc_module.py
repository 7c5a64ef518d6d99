"""CUDA IPC out of a live module, whose tensors may move from one push to the next. Memory of this process stands for a card's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.toys import ToyHost
from torch import nn

from instep import WeightSync
from instep.transport.ipc.export import Exposed
from unit.transport.test_ipc import Layers, ToyEngine, card, fill, holds

__all__ = ["card"]  # a fixture


class Small(nn.Module):
    """A trainer's module with the one tensor that `Layers` read."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4).to(torch.bfloat16))


def stays(module: Small) -> None:
    """Steps in place."""
    with torch.no_grad():
        module.w.neg_().sub_(1)


def is_another(module: Small) -> None:
    module.w = nn.Parameter(torch.randn(5, 4).to(torch.bfloat16))


def has_other_memory(module: Small) -> None:
    module.w.data = torch.randn(5, 4).to(torch.bfloat16)


def comes_back(module: Small) -> None:
    """As from a trainer that gives its memory back between steps. What it had must not be read any more."""
    kept, storage = module.w.detach().clone(), module.w.untyped_storage()
    storage.resize_(0)
    storage.resize_(kept.nbytes)
    with torch.no_grad():
        module.w.copy_(kept).sub_(1)


@pytest.mark.parametrize("moves", [stays, is_another, has_other_memory, comes_back])
def test_a_module_is_followed_wherever_its_tensors_are(moves: Callable[[Small], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are begun before it is looked at. They count only where it turns out that nothing has moved."""
    module, engine = Small(), ToyEngine(ToyHost(Layers(4), fill))
    launched: list[list[int]] = []
    launch = Exposed.launch

    def noted(self: Exposed) -> None:
        launched.append(self.addresses)
        launch(self)

    monkeypatch.setattr(Exposed, "launch", noted)
    with WeightSync(module, [engine]) as sync:
        for version in "abcd":
            moves(module)
            launched.clear()
            sync.push(version)
            assert launched[-1] == [module.w.data_ptr()]
            assert holds(engine.host.model, {"w": module.w.detach()})
        assert len(launched) == (2 if moves in (is_another, has_other_memory) else 1)
