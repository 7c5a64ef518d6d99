"""A trainer computes on streams of its own: nothing is read before its GPU has come to rest."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from helpers.named_weights import WEIGHTS, engine_named, serves
from helpers.toys import described

from instep import WeightSync
from instep.errors import TransportError
from instep.transport.broadcast.publish import BroadcastTransport

pytestmark = pytest.mark.usefixtures("segments")


class OnGpu:
    """A source that says that it is on a GPU. `events`: what happened, in order."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.events: list[str] = []

    def metadata(self) -> Any:
        return described(WEIGHTS["a"])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.events.append("read")
        yield from WEIGHTS["a"].items()

    def stamp(self) -> int:
        return 0

    def score(self, token_ids: list[int]) -> None:
        return None


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    source = OnGpu()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: source.events.append("rest"))
    return source


def test_a_push_waits_for_the_trainers_gpu_before_it_reads(source: OnGpu) -> None:
    engine = engine_named()
    with WeightSync(source, [engine], transport="shm") as sync:
        sync.push("a")
    assert source.events[:2] == ["rest", "read"]
    assert serves(engine) == ("a", "a")


def test_a_broadcast_that_does_not_end_is_an_error_of_the_transport() -> None:
    """... and no bare `TimeoutError`, which nobody takes for a failure of the push."""
    transport: Any = BroadcastTransport("gloo", 0.01)
    transport.sent = Future()
    with pytest.raises(TransportError, match=r"did not send everything within 0\.01 s"):
        transport.finish(None)
    transport.close()
