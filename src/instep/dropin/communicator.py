"""The group of the originals: calls on tensors of all ranks, each ended by a deadline.

All ranks meet before a broadcast (`meeting.py`): bytes that nobody took would be taken for those of
the next one. They are told then how many bytes follow, and their digest. So receivers know whether
they got what the sender has. One that expects something else takes the bytes: ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed import ReduceOp

from instep.digest import MASK, digest, seed_of
from instep.digest_cuda import Table, in_one
from instep.dropin.meeting import Lines, Meeting
from instep.errors import ConfigError, DigestMismatch, PlanError, TransportError
from instep.protocol import ITEM_BYTES, TensorMeta, dtype_name
from instep.transport.group import Group
from instep.transport.store import find, serve

DEADLINE = 300.0
"""Seconds for a group to form and for each call on it, unless told otherwise: what vLLM's examples
wait for a group."""

OF_NCCL = {"nccl", "nccl_version", "unique_id", "comm", "from_unique_id_bytes", "register_comm_window", "register_comm_window_raw"}
OF_NCCL |= {"deregister_comm_window", "suspend", "resume"}


class Communicator:
    """Rank `rank` of `world_size`, on `device`: NCCL for a GPU, Gloo for the CPU. Every call
    returns when its work is done.

    Calls raise `TransportError` at the deadline, when a peer is gone, or when another rank gave up.
    Names and arguments are those of vLLM's `PyNcclCommunicator`; what only NCCL itself has is an
    `AttributeError` that says so. lines: tell which peers are gone.
    """

    def __init__(self, group: Group, timeout: float, lines: Lines | None = None) -> None:
        self.group, self.timeout, self.lines = group, timeout, lines
        self.rank, self.world_size, self.device = group.rank, group.size, group.device
        self.meeting = Meeting(group, lines)
        self.turns = 0
        """Broadcasts that this rank has taken part in."""
        self._together: list[tuple[Callable[[], Any], Callable[[], None]]] | None = None

    @property
    def available(self) -> bool:
        """Whether calls can be made: until the group ends."""
        return self.group.broken is None

    @property
    def disabled(self) -> bool:
        return not self.available

    def __getattr__(self, name: str) -> Any:
        if name in OF_NCCL:
            raise AttributeError(f"{name} is NCCL's own, which vLLM's PyNcclCommunicator holds: this group is one of torch's and has none")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        """Rank `src`'s tensor into everybody else's, of the same dtype and shape.

        Raises `TransportError` on ranks whose tensor is of another dtype or shape, `DigestMismatch`
        where other bytes arrive, and `TransportError` on every rank where some do not take part
        within `timeout`. All of these leave the group in order.
        """
        self.turns += 1
        with self._on(stream):
            if src == self.rank:
                self._send_all(tensor.detach().to(self.device).contiguous(), src)
            else:
                self._receive_all(tensor, src)

    def skip(self, src: int = 0) -> None:
        """Takes part in a broadcast whose tensor this rank has no use for."""
        self.turns += 1
        with self._on(None):
            nbytes = self._told(src)[0]
            self._flat(torch.empty(nbytes, dtype=torch.uint8, device=self.device), src)

    def all_reduce(
        self, in_tensor: torch.Tensor, out_tensor: torch.Tensor | None = None, op: Any = ReduceOp.SUM, stream: Any = None
    ) -> torch.Tensor:
        """All ranks' tensors combined, in `out_tensor`, or as a new tensor."""
        with self._on(stream):
            combined = in_tensor.detach().clone(memory_format=torch.contiguous_format)
            self._run(lambda: self.group.all_reduce(combined, op))
            return combined if out_tensor is None else out_tensor.detach().copy_(combined)

    def all_gather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, stream: Any = None) -> None:
        """All ranks' tensors of one shape, one behind the other in the order of ranks, in
        `output_tensor`."""
        with self._on(stream):
            rooms = self._gathered([input_tensor] * self.world_size, input_tensor)
            output_tensor.detach().copy_(torch.stack(rooms).view(output_tensor.shape))

    def all_gatherv(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, sizes: Sequence[int], stream: Any = None) -> None:
        """As `all_gather`, where rank i has `sizes[i]` rows. Raises `ConfigError` for sizes that do
        not add up."""
        self._check(sizes, output_tensor)
        with self._on(stream):
            output_tensor.detach().copy_(torch.cat(self._gathered(torch.split(output_tensor.detach(), list(sizes)), input_tensor)))

    def reduce(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, root: int, op: Any = ReduceOp.SUM, stream: Any = None
    ) -> None:
        """All ranks' tensors combined, in rank `root`'s `output_tensor`."""
        combined = self.all_reduce(input_tensor, op=op, stream=stream)
        if self.rank == root:
            output_tensor.detach().copy_(combined.view(output_tensor.shape))

    def reduce_scatterv(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, sizes: Sequence[int], op: Any = ReduceOp.SUM, stream: Any = None
    ) -> None:
        """As `reduce_scatter`, where rank i's share has `sizes[i]` rows. Raises `ConfigError` for
        sizes that do not add up."""
        self._check(sizes, input_tensor)
        combined = self.all_reduce(input_tensor, op=op, stream=stream)
        output_tensor.detach().copy_(torch.split(combined, list(sizes))[self.rank].view(output_tensor.shape))

    def scatter(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor | None, sizes: Sequence[int], root: int = 0, stream: Any = None
    ) -> None:
        """Rank `root`'s `sizes[i]` rows to rank i's `output_tensor`. Other ranks need no
        `input_tensor`."""
        if self.rank != root:
            if sizes[self.rank]:
                self.recv(output_tensor, root, stream)
            return
        assert input_tensor is not None
        self._check(sizes, input_tensor)
        self.group_start()
        for rank, rows in enumerate(torch.split(input_tensor.detach(), list(sizes))):
            if rank == root:
                output_tensor.detach().copy_(rows)
            elif len(rows):
                self.send(rows, rank, stream)
        self.group_end()

    def batch_isend_irecv(self, p2p_ops: Sequence[Any], stream: Any = None) -> None:
        """Does what `torch.distributed.P2POp`s say at once. Peers are ranks of this group."""
        self.group_start()
        for one in p2p_ops:
            call = self.send if one.op is torch.distributed.isend else self.recv
            call(one.tensor, one.group_peer, stream)
        self.group_end()

    def reduce_scatter(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, op: Any = ReduceOp.SUM, stream: Any = None) -> None:
        """This rank's share of all ranks' tensors combined, in `output_tensor`."""
        combined = self.all_reduce(input_tensor, op=op, stream=stream)
        output_tensor.detach().copy_(combined.view(self.world_size, -1)[self.rank].view(output_tensor.shape))

    def send(self, tensor: torch.Tensor, dst: int, stream: Any = None) -> None:
        with self._on(stream):
            data = _bytes(tensor.detach().to(self.device).contiguous())
            self._between(lambda: self.group.send(data, dst), lambda: None)

    def recv(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        with self._on(stream):
            room = tensor.detach().to(self.device).contiguous()
            self._between(lambda: self.group.recv(_bytes(room), src), lambda: _put(room, tensor))

    def group_start(self) -> None:
        """Until `group_end`, `send` and `recv` only note what is to be done."""
        self._together = []

    def group_end(self) -> None:
        """Sends and receives what was noted, all at the same time."""
        noted, self._together = self._together or [], None
        with self._on(None):
            self._run(*(start for start, _ in noted))
            for _, then in noted:
                then()

    def give_up(self, reason: str) -> None:
        """Ends every rank's waits. The group is of no more use."""
        self.group.give_up(reason)

    def close(self) -> None:
        self.group.close()
        if self.lines is not None:
            self.lines.close()

    def destroy(self) -> None:
        """`close`, by the name that vLLM has for it."""
        self.close()

    def _check(self, sizes: Sequence[int], rows: torch.Tensor) -> None:
        if len(sizes) != self.world_size or sum(sizes) != len(rows):
            raise ConfigError(f"sizes {list(sizes)} are not the rows of {self.world_size} ranks that add up to {len(rows)}")

    def _gathered(self, like: Sequence[torch.Tensor], mine: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors. like: tensors of their shapes and dtypes, by rank."""
        rooms = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in like]
        rooms[self.rank].copy_(mine.detach())
        for rank, room in enumerate(rooms):
            self._flat(_bytes(room), rank)
        return rooms

    def _send_all(self, data: torch.Tensor, src: int) -> None:
        meta = nameless(data)
        self.meeting.ask(f"{data.nbytes} {seed_of(meta)} {sum_of(data, meta)}", self.timeout)
        self._flat(_bytes(data), src)

    def _receive_all(self, tensor: torch.Tensor, src: int) -> None:
        room = tensor.detach().to(self.device).contiguous()
        meta = nameless(room)
        nbytes, seed, sent = self._told(src)
        if (nbytes, seed) != (room.nbytes, seed_of(meta)):
            self._flat(torch.empty(nbytes, dtype=torch.uint8, device=self.device), src)
            raise TransportError(
                f"rank {src} sent {nbytes} bytes that are no {meta.dtype} of shape {list(meta.shape)}, which are {room.nbytes}",
                next_step="announce the dtype and shape of the very tensor that is sent",
            )
        self._flat(_bytes(room), src)
        if (got := sum_of(room, meta)) != sent:
            raise DigestMismatch(f"a {meta.dtype} of shape {list(meta.shape)} arrived with digest {got:016x}, rank {src} sent {sent:016x}")
        _put(room, tensor)

    def _told(self, src: int) -> list[int]:
        """How many bytes rank `src` sends, the seed of their dtype and shape, their digest."""
        return [int(value) for value in self.meeting.come(src, self.timeout).split()]

    def _flat(self, data: torch.Tensor, src: int) -> None:
        if data.numel():
            self._run(lambda: self.group.broadcast(data, src))

    def _run(self, *starts: Callable[[], Any]) -> None:
        self.group.begin(self.timeout)
        for work in [start() for start in starts]:
            self.group.wait(work)
        self.group.settle()

    def _between(self, start: Callable[[], Any], then: Callable[[], None]) -> None:
        if self._together is not None:
            self._together.append((start, then))
        else:
            self._run(start)
            then()

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        """The caller's stream, or the current one of the group's device, whatever device is current
        in this thread."""
        if stream is not None:
            return torch.cuda.stream(stream)
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def join(host: str, port: int, rank: int, world_size: int, device: torch.device, timeout: float, key: str = "") -> Communicator:
    """Rank 0 serves the store at this address and port. Returns when all ranks have come.

    Raises `TransportError` after `timeout` seconds without them, `ConfigError` for a device that
    has no backend here.
    """
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"a group on {device} is not possible: there are NCCL for CUDA's GPUs and Gloo for the CPU")
    try:
        store = serve(host, port) if rank == 0 else find(host, port, timeout)
    except OSError as error:
        raise TransportError(f"rank 0 cannot serve the group's store at {host} port {port}: {error}") from error
    backend = "nccl" if device.type == "cuda" else "gloo"
    key = f"instep {backend} {key}"  # ranks of different backends do not meet: one would wait in a way that cannot be ended
    group = Group(backend, store, key, rank, world_size, device, timeout)
    return Communicator(group, timeout, Lines(group, host))


def nameless(tensor: torch.Tensor) -> TensorMeta:
    """What is known of a tensor by those who do not know its name."""
    return TensorMeta("", dtype_name(tensor.dtype), tuple(tensor.shape))


def sum_of(tensor: torch.Tensor, meta: TensorMeta) -> int:
    """The digest of a contiguous tensor, taken where it lies."""
    if not tensor.is_cuda or not tensor.nbytes or tensor.nbytes % 8 or tensor.data_ptr() % 8:
        return digest(tensor, meta)
    table = Table([in_one(tensor.data_ptr(), meta, 0)], 1, tensor.device, copy=False)
    table.launch()
    return (seed_of(meta) + table.result()[0][0]) & MASK


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """Returns the dtype of a name. Raises `PlanError` for one that cannot travel."""
    text = dtype_name(name)
    if text not in ITEM_BYTES:
        raise PlanError(f"dtype {text!r} cannot be sent; known: {', '.join(ITEM_BYTES)}")
    found: torch.dtype = getattr(torch, text)
    return found


def _bytes(data: torch.Tensor) -> torch.Tensor:
    return data.reshape(-1).view(torch.uint8)


def _put(room: torch.Tensor, tensor: torch.Tensor) -> None:
    if room.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(room)
