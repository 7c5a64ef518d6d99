"""The drop-ins' group on the CPU: real Gloo, one thread for each rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.toys import bits

from instep.dropin import communicator
from instep.dropin.communicator import Communicator, join
from instep.errors import ConfigError, DigestMismatch, TransportError

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def group(size: int, timeout: float = 10) -> list[Communicator]:
    port = free_port()
    return at_once([lambda rank=rank: join("127.0.0.1", port, rank, size, CPU, timeout) for rank in range(size)])


def at_once(actions: Sequence[Callable[..., Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(30) for future in [pool.submit(action) for action in actions]]


@pytest.fixture
def ranks() -> Iterator[list[Communicator]]:
    made = group(3)
    yield made
    for one in made:
        one.close()


TENSORS = {
    "bfloat16": torch.randn(5, 7).to(torch.bfloat16),
    "float8": torch.randn(5, 7).to(torch.float8_e4m3fn),
    "a bool": torch.tensor([True, False, True]),
    "a scalar": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
    "strided": torch.randn(6, 4).t(),
    "a parameter": torch.nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_broadcast_brings_the_bytes(ranks: list[Communicator], tensor: torch.Tensor) -> None:
    rooms = [torch.nn.Parameter(torch.zeros_like(tensor)) if tensor.requires_grad else torch.zeros_like(tensor) for _ in range(2)]
    sending = [lambda: ranks[1].broadcast(tensor, src=1)]
    at_once(
        sending + [lambda rank=rank, room=room: rank.broadcast(room, src=1) for rank, room in zip((ranks[0], ranks[2]), rooms, strict=True)]
    )
    assert all(torch.equal(bits(room), bits(tensor)) for room in rooms)


def test_the_other_collectives(ranks: list[Communicator]) -> None:
    inputs = [torch.full((3, 2), float(rank + 1)) for rank in range(3)]
    sums = at_once([lambda rank=rank: ranks[rank].all_reduce(inputs[rank]) for rank in range(3)])
    assert [total.tolist() for total in sums] == [[[6.0, 6.0]] * 3] * 3
    assert [tensor[0, 0].item() for tensor in inputs] == [1, 2, 3]
    room = torch.zeros(2, 3).t()
    at_once([lambda: ranks[0].send(inputs[0], dst=2), lambda: ranks[2].recv(room, src=0)])
    assert torch.equal(room, inputs[0])


def test_the_calls_of_vllms_communicator(ranks: list[Communicator]) -> None:
    inputs = [torch.arange(6.0).view(3, 2) + 10 * rank for rank in range(3)]
    outs, all_of_them, shares = ([torch.empty(shape) for _ in range(3)] for shape in ((3, 2), (9, 2), (1, 2)))
    at_once([lambda rank=rank: ranks[rank].all_reduce(inputs[rank], outs[rank]) for rank in range(3)])
    at_once([lambda rank=rank: ranks[rank].all_gather(all_of_them[rank], inputs[rank]) for rank in range(3)])
    at_once([lambda rank=rank: ranks[rank].reduce_scatter(shares[rank], inputs[rank]) for rank in range(3)])
    total = inputs[0] + inputs[1] + inputs[2]
    assert all(torch.equal(out, total) for out in outs)
    assert all(torch.equal(one, torch.cat(inputs)) for one in all_of_them)
    assert torch.equal(torch.cat(shares), total)


def test_the_calls_whose_ranks_have_different_shares(ranks: list[Communicator]) -> None:
    whole, sizes = torch.arange(12.0).view(6, 2), [3, 0, 3]
    rows = whole.split(sizes)
    gathered, summed = [torch.empty(6, 2) for _ in range(3)], [torch.empty_like(one) for one in rows]
    at_once([lambda rank=rank: ranks[rank].all_gatherv(gathered[rank], rows[rank], sizes) for rank in range(3)])
    assert all(torch.equal(one, whole) for one in gathered)
    at_once([lambda rank=rank: ranks[rank].reduce_scatterv(summed[rank], whole, sizes) for rank in range(3)])
    assert torch.equal(torch.cat(summed), 3 * whole)
    only = torch.zeros(6, 2)
    at_once([lambda rank=rank: ranks[rank].reduce(only, whole, root=1) for rank in range(3)])
    assert torch.equal(only, 3 * whole)
    rooms = [torch.zeros_like(one) for one in rows]
    at_once([lambda rank=rank: ranks[rank].scatter(rooms[rank], whole if rank == 1 else None, sizes, root=1) for rank in range(3)])
    assert torch.equal(torch.cat(rooms), whole)
    got = [torch.zeros(2), torch.zeros(2)]
    isend, irecv = torch.distributed.isend, torch.distributed.irecv

    def swap(rank: int) -> None:
        operations = [SimpleNamespace(op=isend, tensor=whole[rank], group_peer=1 - rank)]
        ranks[rank].batch_isend_irecv([*operations, SimpleNamespace(op=irecv, tensor=got[rank], group_peer=1 - rank)])

    at_once([lambda: swap(0), lambda: swap(1)])
    assert [one.tolist() for one in got] == [whole[1].tolist(), whole[0].tolist()]
    with pytest.raises(ConfigError, match="add up to 6"):
        ranks[0].all_gatherv(torch.empty(6, 2), rows[0], [1, 2, 2])


def test_the_attributes_of_vllms_communicator() -> None:
    (alone,) = group(1)
    assert (alone.rank, alone.world_size, alone.device, alone.available, alone.disabled) == (0, 1, CPU, True, False)
    alone.broadcast(torch.ones(2), src=0)
    with pytest.raises(AttributeError, match="unique_id is NCCL's own"):
        _ = alone.unique_id
    alone.destroy()
    assert (alone.available, alone.disabled) == (False, True)
    with pytest.raises(TransportError, match="it was closed"):
        alone.broadcast(torch.ones(2), src=0)


def test_a_device_without_a_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="a group on xpu is not possible"):
        join("127.0.0.1", free_port(), 0, 2, torch.device("xpu"), 10)


def test_a_group_of_calls_is_made_at_the_same_time(ranks: list[Communicator]) -> None:
    """Each sends before it receives: one after the other, nobody would get to receive."""
    rooms = [torch.zeros(4) for _ in range(3)]

    def turn(rank: int) -> None:
        ranks[rank].group_start()
        ranks[rank].send(torch.full((4,), float(rank)), dst=(rank + 1) % 3)
        ranks[rank].recv(rooms[rank], src=(rank + 2) % 3)
        ranks[rank].group_end()

    at_once([lambda rank=rank: turn(rank) for rank in range(3)])
    assert [room[0].item() for room in rooms] == [2, 0, 1]


@pytest.mark.parametrize("room", [torch.zeros(2, 3), torch.zeros(6, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.int32)])
def test_a_receiver_that_expects_something_else_stays_in_step(ranks: list[Communicator], room: torch.Tensor) -> None:
    sent, rooms = torch.arange(6.0), [torch.zeros(6) for _ in range(2)]

    def confused() -> None:
        with pytest.raises(TransportError, match=r"sent 24 bytes that are no"):
            ranks[1].broadcast(room)
        ranks[1].broadcast(rooms[0])

    def whole() -> None:
        ranks[2].skip()
        ranks[2].broadcast(rooms[1])

    at_once([lambda: [ranks[0].broadcast(sent), ranks[0].broadcast(sent + 1)], confused, whole])
    assert [room.tolist() for room in rooms] == [(sent + 1).tolist()] * 2


def test_bytes_that_are_not_the_senders_are_noticed(ranks: list[Communicator], monkeypatch: pytest.MonkeyPatch) -> None:
    sums = iter([1, 2, 2])
    monkeypatch.setattr(communicator, "sum_of", lambda tensor, meta: next(sums))

    def receive(rank: int) -> None:
        with pytest.raises(DigestMismatch, match="digest 0000000000000002, rank 0 sent 0000000000000001"):
            ranks[rank].broadcast(torch.zeros(4))

    at_once([lambda: ranks[0].broadcast(torch.ones(4)), lambda: receive(1), lambda: receive(2)])


def test_no_call_waits_longer_than_its_deadline() -> None:
    ranks = group(2, timeout=1)
    started = time.monotonic()
    with pytest.raises(TransportError, match="did not take part within 1 s"):
        ranks[0].all_reduce(torch.ones(4))
    with pytest.raises(TransportError, match=r"another rank gave up|ended earlier"):
        ranks[1].broadcast(torch.ones(4))
    assert time.monotonic() - started < 10
    with pytest.raises(TransportError, match="rank 1 of 2 did not come within"):
        join("127.0.0.1", free_port(), 0, 2, CPU, 1)
    with pytest.raises(TransportError, match="cannot serve"), socket.create_server(("127.0.0.1", 0)) as taken:
        join("127.0.0.1", taken.getsockname()[1], 0, 2, CPU, 1)
    with pytest.raises(TransportError, match="does not answer"):
        join("127.0.0.1", free_port(), 1, 2, CPU, 1)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("come", [0, 1])
def test_a_broadcast_that_not_all_join_is_called_off_and_the_group_goes_on(ranks: list[Communicator], come: int) -> None:
    """Also where some have come. Small tensors too, which Gloo would send ahead of ranks that are not there."""
    waits, rooms = {0: "rank 1 was not called within 1 s", 1: "rank 2 was not called within 1 s"}, [torch.zeros(4) for _ in range(2)]

    def alone() -> None:
        ranks[0].timeout = 1
        with pytest.raises(TransportError, match=waits[come]):
            ranks[0].broadcast(torch.full((4,), 7.0))
        ranks[0].timeout = 10

    def called_off() -> None:
        with pytest.raises(TransportError, match="rank 0 called its broadcast off: rank 2 was not called"):
            ranks[1].broadcast(torch.zeros(4))

    for _ in range(2):
        at_once([alone, *[called_off] * come])
        for source in (0, 0, 2):
            sent = torch.rand(4)
            others = [rank for rank in ranks if rank.rank != source]
            receiving = [partial(rank.broadcast, room, source) for rank, room in zip(others, rooms, strict=True)]
            at_once([partial(ranks[source].broadcast, sent, source), *receiving])
            assert [room.tolist() for room in rooms] == [sent.tolist()] * 2


def test_a_receiver_to_which_nothing_is_sent_stays_in_step(ranks: list[Communicator]) -> None:
    ranks[1].timeout = 0.5
    with pytest.raises(TransportError, match=r"rank 0 did not broadcast within 0\.5 s"):
        ranks[1].broadcast(torch.zeros(4))
    ranks[1].timeout = 10
    rooms = [torch.zeros(4) for _ in range(2)]
    at_once([lambda: ranks[0].broadcast(torch.ones(4)), lambda: ranks[1].broadcast(rooms[0]), lambda: ranks[2].broadcast(rooms[1])])
    assert [room.tolist() for room in rooms] == [[1.0] * 4] * 2


def test_a_rank_that_is_gone_is_not_waited_for(ranks: list[Communicator]) -> None:
    started = time.monotonic()
    ranks[2].close()
    with pytest.raises(TransportError, match="the process of rank 2 has ended, or has left the group"):
        ranks[0].broadcast(torch.ones(4))
    assert time.monotonic() - started < 5


def test_a_first_rank_that_is_gone_is_not_waited_for(ranks: list[Communicator]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[1].broadcast, torch.zeros(4))
        with pytest.raises(FutureTimeout):
            waiting.result(0.3)
        ranks[0].close()
        with pytest.raises(TransportError, match="the process of rank 0 has ended, or has left the group"):
            waiting.result(5)


def test_who_gives_up_ends_the_others_waits() -> None:
    ranks = group(2, timeout=60)
    started = time.monotonic()

    def give_up() -> None:
        time.sleep(0.2)
        ranks[1].give_up("told to")

    def wait() -> None:
        with pytest.raises(TransportError, match="told to"):
            ranks[0].broadcast(torch.ones(4))

    at_once([wait, give_up])
    assert time.monotonic() - started < 10
