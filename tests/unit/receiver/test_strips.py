"""Small regions that are copied and compared without a tensor for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, ToyHost, described, start
from torch import nn

from instep.errors import DigestMismatch
from instep.plan.buckets import layout
from instep.protocol import TensorMeta
from instep.receiver import arrival as arrivals
from instep.receiver import regions
from instep.receiver.apply import Applier
from instep.receiver.arrival import Seen
from instep.receiver.lazy import Lazy
from instep.transport.reader import Visible

SHAPES = {"turned": (64, 2), "left": (8, 4), "right": (8, 4), "large": (1 << 15,), "wide": (3,)}


class Model(nn.Module):
    """Layers of one parameter each: `pair` holds `left` and `right` one after the other, `turned` is stored transposed, and `wide` in
    more bits than it is sent in."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"pair": (16, 4), "turned": (2, 64), "large": (1 << 15,), "wide": (3,)}.items():
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64 if name == "wide" else torch.float32))
            setattr(self, name, layer)


def fill(model: Any, name: str, tensor: torch.Tensor) -> None:
    if name in ("left", "right"):
        model.pair.weight[8 * (name == "right") :][:8].copy_(tensor)
    else:
        model.get_parameter(f"{name}.weight").copy_(tensor.t() if name == "turned" else tensor)


def weights(seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Run(Visible):
    """A version in one run of bytes."""

    def __init__(self, tensors: Checkpoint) -> None:
        self.metas = described(tensors)
        self.offsets, size = layout(self.metas)
        self.room = self.flat = torch.zeros(size, dtype=torch.uint8)
        for meta in self.metas:
            self.tensor(meta).copy_(tensors[meta.name])

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        return {}

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        return self.room[self.offsets[meta.name] :][: meta.nbytes].view(torch.float32).view(meta.shape)

    def seen(self) -> Seen:
        return Seen(Lazy({meta.name: meta for meta in self.metas}, self.tensor), self.metas, self)


@pytest.fixture
def pushed() -> Applier:
    """A worker after its first push."""
    applier = start(ToyHost(Model(), fill), weights(0))
    push(applier, Run(weights(1)))
    assert applier.direct == {"pair", "turned", "large", "wide"}
    return applier


def push(applier: Applier, version: Run, between: Callable[[], object] = lambda: None) -> None:
    with torch.no_grad():
        arrival = version.seen()
        applier.apply(arrival)
        between()
        arrival.prove(applier)


def holds(applier: Applier, tensors: Checkpoint) -> bool:
    model: Any = applier.host.model
    found = {"left": model.pair.weight[:8], "right": model.pair.weight[8:], "turned": model.turned.weight.t()}
    found |= {name: model.get_parameter(f"{name}.weight") for name in ("large", "wide")}
    return all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in tensors.items())


def test_only_what_is_large_or_laid_out_otherwise_takes_a_tensor_for_each_route(pushed: Applier, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    copy_regions = regions.copy_regions
    monkeypatch.setattr(
        arrivals, "copy_regions", lambda routes, *given: copied.extend(str(r.tensor) for r in routes) or copy_regions(routes, *given)
    )
    push(pushed, Run(weights(2)))
    assert sorted(copied) == ["large", "turned", "wide"]
    assert holds(pushed, weights(2))


@pytest.mark.parametrize("name", ["pair", "turned", "large", "wide"])
def test_a_write_beside_the_push_is_named(pushed: Applier, name: str) -> None:
    weight = pushed.host.model.get_parameter(f"{name}.weight")
    with pytest.raises(DigestMismatch, match="after the copy") as caught:
        push(pushed, Run(weights(2)), lambda: weight.view(-1)[-1].add_(1))
    assert caught.value.tensor == {"pair": "right"}.get(name, name)


def test_a_parameter_that_has_moved_is_found_where_it_lies_now(pushed: Applier) -> None:
    weight = pushed.host.model.get_parameter("pair.weight")
    before = weight.data
    weight.data = torch.zeros(16, 4)
    push(pushed, Run(weights(3)))
    assert holds(pushed, weights(3))
    assert torch.equal(before[:8], weights(3)["left"])  # looked at after the first copy


def test_memory_that_was_given_up_is_not_written_to(pushed: Applier) -> None:
    copies = pushed.copies()
    copies.live["pair.weight"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        Run(weights(2)).seen().move(copies, None, in_turn=False)
