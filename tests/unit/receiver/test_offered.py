"""What a loader is given in a push is what it is given when the engine loads from disk."""

from __future__ import annotations

import pytest
import torch

from instep.protocol import WorkerPlan
from instep.receiver.regions import offered


def test_what_a_loader_computes_with_is_offered_to_it_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exponential on a GPU differs in the last bit from the one that an initial load computes."""
    plan = WorkerPlan([], [], {}, computed={"w": []})
    there, here, asked = torch.zeros(2), torch.ones(2), list[torch.Tensor]()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: asked.append(tensor) or here)
    ((_, given), (_, other)) = offered(plan, {"w", "other"}, {"w": there, "more": there, "other": there})
    assert (given is here, other is there, len(asked)) == (True, True, 1)


def test_what_a_loader_writes_into_is_a_copy() -> None:
    plan = WorkerPlan([], [], {}, computed={"w": []}, overwritten=["w"])
    ((_, given),) = offered(plan, {"w"}, {"w": (mine := torch.zeros(2))})
    assert given.data_ptr() != mine.data_ptr()
