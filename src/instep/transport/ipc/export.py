"""Shares GPU memory of one trainer process over CUDA IPC: parts of tensors, in place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch
from msgspec import structs

from instep.digest_cuda import Table, mark, run_of
from instep.errors import TransportError
from instep.plan.rows import of_place
from instep.protocol import Location, Place, TensorMeta, encode
from instep.transport.ipc import driver
from instep.transport.parts import Part

EXPANDABLE = (
    "its memory is in expandable segments, which cannot be shared: unset expandable_segments in PYTORCH_ALLOC_CONF "
    "(or PYTORCH_CUDA_ALLOC_CONF) of the trainer"
)


class Offer(msgspec.Struct, frozen=True):
    """What a process shares: handles of its allocations, and where in them the parts of tensors
    lie."""

    handles: list[bytes]
    places: dict[str, list[Place]]


class Exposed:
    """Parts of tensors on one GPU of this process, shared until one of them moves. The object keeps
    their memory alive.

    launches: how often the parts were summed up. The same number is the first word of a board on
    the GPU, written after the sums of that launch, which follow in the order of `offer.places`.
    Workers that map the parts can read the board, so none has to wait for this process.
    summed: tells whether the last launch has ended.

    known: handles of allocations, by base address. Raises `TransportError` where memory cannot be
    shared.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device, known: Mapping[int, bytes]) -> None:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # makes the context current in this thread before the driver is called
            self.launches, slots = 0, len({part.meta.name for part in parts})
            self.board = torch.zeros(1 + 2 * slots, dtype=torch.int64, device=device)
            self.mark, sums = self.board[:1], self.board[1:]
            self.memories = [part.memory for part in parts]
            addresses = dict.fromkeys((self.board.data_ptr(), *map(torch.Tensor.data_ptr, self.memories)))
            bases = {address: driver.allocation(address)[0] for address in addresses}
            self.handles = {base: known.get(base) or _handle(base) for base in bases.values()}
        order = {base: index for index, base in enumerate(self.handles)}
        places: dict[str, list[Place]] = {}
        runs = []
        for part in parts:
            base = bases[part.memory.data_ptr()]
            place = Place(part.rows.written, order[base], part.address - base, part.rows.place_stride)
            places.setdefault(part.meta.name, []).append(place)
            runs.append(run_of(of_place(place, part.meta, base), part.meta, len(places) - 1))
        self.offer = Offer(list(self.handles.values()), places)
        base = bases[self.board.data_ptr()]
        self.board_at = order[base], self.board.data_ptr() - base
        self.table = Table(runs, slots, device, copy=False, sums=sums)
        self.device = device
        self.summed: Callable[[], bool] = lambda: True
        storages = map(torch.Tensor.untyped_storage, self.memories)
        self.storages = list({storage._cdata: storage for storage in storages}.values())  # a few hundred hold 19,000 tensors of experts
        self.addresses = self._addresses()

    def stay(self) -> bool:
        """Tells whether the parts still have their memory. A trainer that offloads may free a
        tensor's storage while the tensor lives."""
        return self._addresses() == self.addresses

    def _addresses(self) -> list[int]:
        return [storage.data_ptr() for storage in self.storages]

    def launch(self) -> None:
        """Waits for the trainer's work before any worker reads, then starts to sum up the very
        memory that workers will read."""
        torch.cuda.synchronize(self.device)
        self.table.launch()
        self.launches += 1
        self.mark.fill_(self.launches)  # an assignment would wait for the kernel
        self.summed = mark(self.device)

    def result(self) -> dict[str, tuple[int, bool]]:
        """Waits for the sums. Returns for each tensor the sum over its parts, without the seed, and
        whether they hold a number that is not finite."""
        return dict(zip(self.offer.places, zip(*self.table.result(), strict=True), strict=True))


def located(tensors: Sequence[TensorMeta], offers: Iterable[Offer], board: tuple[int, int] | None = None) -> Location:
    """Makes the location of a version whose parts are in these offers. Its address depends on all
    places, because workers keep what they have worked out for an address.

    board: that of the only offer.
    """
    order: dict[bytes, int] = {}
    places: dict[str, list[Place]] = {}
    for offer in offers:
        numbers = [order.setdefault(handle, len(order)) for handle in offer.handles]
        for name, some in offer.places.items():
            places.setdefault(name, []).extend(structs.replace(place, handle=numbers[place.handle]) for place in some)
    nbytes = sum(meta.nbytes for meta in tensors if not meta.alias_of)
    location = Location("ipc", "", nbytes, handles=list(order), places=places, board=board, live=True)
    return structs.replace(location, address=hashlib.blake2b(encode(location), digest_size=16).hexdigest())


def _handle(base: int) -> bytes:
    try:
        return driver.share(base)
    except TransportError as error:
        raise TransportError(f"the trainer's GPU memory cannot be shared: {EXPANDABLE} ({error.args[0]})") from error
