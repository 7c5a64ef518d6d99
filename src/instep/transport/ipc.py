"""CUDA IPC: the trainer publishes handles of its live parameters, workers pull from them straight into their own.

Nothing is copied on the trainer's side, so the trainer must not step before every worker has pulled: `push` returns after that. Handles are
made once for each allocation of the trainer and opened once by each worker; they are made anew when the trainer's storage has moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import compress
from operator import eq

import torch
from msgspec import structs

from instep.digest import MASK, seed_of
from instep.digest_cuda import Table, in_one
from instep.errors import SourceError, TransportError
from instep.protocol import Identity, Location, Manifest, TensorMeta, encode
from instep.transport import Me, Published, Pull, driver, elsewhere

EXPANDABLE = (
    "its memory is in expandable segments, which cannot be shared: unset expandable_segments in PYTORCH_ALLOC_CONF "
    "(or PYTORCH_CUDA_ALLOC_CONF) of the trainer"
)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What was published of a source, good for as long as its tensors lie where they lay.

    places: of the source's tensors, by name. shared: the tensors that workers read. staged: those of them that are copies.
    """

    tensors: list[TensorMeta]
    places: dict[str, Hashable]
    shared: dict[str, torch.Tensor]
    staged: list[str]
    location: Location
    table: Table

    def fits(self, tensors: list[TensorMeta], given: dict[str, torch.Tensor]) -> bool:
        same = self.tensors == tensors and list(self.places) == list(given)
        return same and all(map(eq, map(_place, given.values()), self.places.values()))


def _place(tensor: torch.Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


class IpcTransport(Pull):
    """The trainer's side. Tensors that are not contiguous, not of the dtype to send, or no whole number of 8-byte words are staged in
    buffers on the trainer's GPU, which are kept."""

    def __init__(self) -> None:
        self.handles: dict[int, bytes] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.layout: _Layout | None = None  # its tensors are kept until the next publication: some were made for this one

    def consider(self, device: torch.device, workers: Sequence[Identity]) -> str | None:
        if device.type != "cuda":
            return f"the trainer's tensors are on {device.type}"
        other = next((worker.device for worker in workers if not worker.device.startswith("cuda")), None)
        return f"an engine's worker is on {other}" if other else elsewhere(workers)

    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """Of tensors that have not moved since the last time only the digests are taken anew."""
        given: dict[str, torch.Tensor] = {}
        for name, value in values:
            if given.setdefault(name, value) is not value:
                raise SourceError(f"the source gave {name} twice", tensor=name)
        if self.layout is None or not self.layout.fits(tensors, given):
            self.layout = self._lay_out(tensors, given)
        layout = self.layout
        for name in layout.staged:
            layout.shared[name].copy_(given[name].detach())
        torch.cuda.synchronize(next(iter(given.values())).device)  # for the trainer's work, before anybody reads
        layout.table.launch()  # over the very memory that workers will read
        return Published(layout.location, {})

    def finish(self, published: Published) -> Published:
        """What was summed up meanwhile."""
        assert self.layout is not None
        sums, flags = self.layout.table.result()
        metas = {meta.name: meta for meta in self.layout.tensors}
        digests = {name: (seed_of(metas[name]) + part) & MASK for name, part in zip(self.layout.shared, sums, strict=True)}
        return Published(published.location, digests, tuple(compress(digests, flags)))

    def _lay_out(self, tensors: list[TensorMeta], given: dict[str, torch.Tensor]) -> _Layout:
        metas = {meta.name: meta for meta in tensors if not meta.alias_of}
        device = next(iter(given.values())).device
        shared = {name: self._shareable(name, value.detach(), metas.get(name), device) for name, value in given.items()}
        if missing := metas.keys() - shared.keys():
            raise SourceError(f"the source did not give {min(missing)}, which its metadata names", tensor=min(missing))
        torch.cuda.synchronize(device)  # makes the context current in this thread before the driver is called
        bases = {name: driver.allocation(tensor.data_ptr())[0] for name, tensor in shared.items()}
        self.handles = {base: self.handles.get(base) or _handle(base) for base in bases.values()}
        order = {base: index for index, base in enumerate(self.handles)}
        offsets = {name: tensor.data_ptr() - bases[name] for name, tensor in shared.items()}
        location = Location(
            transport="ipc",
            address="",
            nbytes=sum(meta.nbytes for meta in metas.values()),
            offsets=offsets,
            handles=list(self.handles.values()),
            handle_of={name: order[bases[name]] for name in shared},
            live=True,
        )
        # Another address for other places: workers keep what they have worked out for one.
        location = structs.replace(location, address=hashlib.blake2b(encode(location), digest_size=16).hexdigest())
        return _Layout(
            list(tensors),
            {name: _place(value) for name, value in given.items()},
            shared,
            [name for name, value in given.items() if shared[name].data_ptr() != value.data_ptr()],
            location,
            _table(shared, metas, device),
        )

    def _shareable(self, name: str, value: torch.Tensor, meta: TensorMeta | None, device: torch.device) -> torch.Tensor:
        """The value itself, or room for a copy of it."""
        if meta is None or tuple(value.shape) != meta.shape:
            raise SourceError(f"the source gave {name} {list(value.shape)}, which is not what its metadata says", tensor=name)
        if value.device != device:
            raise TransportError(f"{name} is on {value.device}, other weights on {device}: CUDA IPC shares memory of one GPU")
        dtype = getattr(torch, meta.dtype)
        if value.dtype == dtype and value.is_contiguous() and meta.nbytes % 8 == 0 and value.data_ptr() % 8 == 0:
            return value
        if name not in self.buffers or self.buffers[name].nbytes < meta.nbytes:
            self.buffers[name] = torch.zeros(-(-meta.nbytes // 8), dtype=torch.int64, device=device)
        return self.buffers[name].view(torch.uint8)[: meta.nbytes].view(dtype).view(meta.shape)

    def release_all_but(self, held: Set[str]) -> None:
        """The memory is the trainer's own."""

    def close(self) -> None:
        self.buffers.clear()
        self.handles.clear()
        self.layout = None


def _table(shared: dict[str, torch.Tensor], metas: dict[str, TensorMeta], device: torch.device) -> Table:
    """Sums up each tensor in a slot of its own."""
    runs = [in_one(tensor.data_ptr(), metas[name], slot) for slot, (name, tensor) in enumerate(shared.items())]
    return Table(runs, len(runs), device, copy=False)


def _handle(base: int) -> bytes:
    try:
        return driver.share(base)
    except TransportError as error:
        raise TransportError(f"the trainer's GPU memory cannot be shared: {EXPANDABLE} ({error.args[0]})") from error


def current_gpu() -> torch.device:
    """Of this worker. Raises `TransportError` where it has none."""
    if not torch.cuda.is_available():
        raise TransportError("this worker has no GPU: CUDA IPC cannot reach it")
    return torch.device("cuda", torch.cuda.current_device())


OPENED: dict[bytes, int] = {}
"""Handles that this process has mapped, and where. Opening one twice in a process is an error of the driver."""


class IpcReader:
    """A worker's side, on the worker's current device. Addresses stay mapped from version to version, in `OPENED`."""

    arrived = fetches = split = False

    def __init__(self, manifest: Manifest, _: Me) -> None:
        self.device = current_gpu()
        self.location = manifest.location
        self.metas = {meta.name: meta for meta in manifest.tensors}
        if new := [handle for handle in self.location.handles if handle not in OPENED]:
            torch.cuda.synchronize(self.device)  # makes the context current before the driver is called
            for handle in new:
                OPENED[handle] = _attach(handle)
        for handle in OPENED.keys() - set(self.location.handles):
            driver.detach(OPENED.pop(handle))
        self.bases = [OPENED[handle] for handle in self.location.handles]
        self.sums: dict[str, int] = {}

    def address(self, meta: TensorMeta) -> int:
        """Where the tensor's first byte is mapped in this process."""
        name = meta.alias_of or meta.name
        return self.bases[self.location.handle_of[name]] + self.location.offsets[name]

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        """A copy on the engine's own GPU, its digest taken on the way: for layers that are not copied directly."""
        own = self.metas[meta.alias_of or meta.name]
        room = torch.empty(-(-meta.nbytes // 8), dtype=torch.int64, device=self.device)
        table = Table([in_one(self.address(own), own, 0, target=room.data_ptr())], 1, self.device, copy=True)
        table.launch()
        self.sums[own.name] = table.result()[0][0]
        return room.view(torch.uint8)[: meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        """Nothing: bytes are pulled, and summed up, in the commit."""
        return {}

    def stop(self) -> None: ...

    def close(self) -> bool:
        return True


def _attach(handle: bytes) -> int:
    try:
        return driver.attach(handle)
    except TransportError as error:
        raise TransportError(
            f"the trainer's GPU memory cannot be opened from this worker: {error.args[0]}",
            next_step="trainer and engine need one host, GPUs with peer access (nvidia-smi topo -p2p r), and in a container shared IPC",
        ) from error
