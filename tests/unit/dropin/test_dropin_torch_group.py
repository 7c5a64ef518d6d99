"""The group that Open Instruct's trainer holds, in the functions of `torch.distributed` that its loop calls."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from instep.dropin.open_instruct import init_process_group
from unit.dropin.test_dropin_communicator import at_once, free_port

pytestmark = pytest.mark.timeout(60)


def joined() -> list[Any]:
    method = f"tcp://127.0.0.1:{free_port()}"
    settings: dict[str, Any] = {"world_size": 2, "group_name": "openrlhf", "timeout": timedelta(seconds=10)}
    return at_once([lambda rank=rank: init_process_group("gloo", method, rank=rank, **settings) for rank in range(2)])


@pytest.mark.parametrize("async_op", [False, True])
def test_torch_broadcasts_over_it(async_op: bool) -> None:
    """Without torch's own global group, which a trainer on one GPU does not have."""
    ranks = joined()
    sent, room = torch.nn.Parameter(torch.randn(3, 4)), torch.zeros(3, 4)
    for _ in range(2):
        works = at_once(
            [
                lambda: torch.distributed.broadcast(sent.data, 0, group=ranks[0], async_op=async_op),
                lambda: torch.distributed.broadcast(room, 0, group=ranks[1], async_op=async_op),
            ]
        )
        assert torch.equal(room, sent)
        assert [work.wait() if async_op else work for work in works] == [async_op or None] * 2
        sent.data.neg_()
    for one in ranks:
        one.close()
    with pytest.raises(ValueError, match="not registered"):
        torch.distributed.broadcast(sent.data, 0, group=ranks[0])


def test_its_own_broadcast_stays() -> None:
    ranks, room = joined(), torch.zeros(5)
    at_once([lambda: ranks[0].broadcast(torch.ones(5), 0), lambda: ranks[1].broadcast(room, src=0)])
    assert torch.equal(room, torch.ones(5))
    for one in ranks:
        one.close()
