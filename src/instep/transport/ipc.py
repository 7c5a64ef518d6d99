"""CUDA IPC: the trainer publishes handles of its live parameters, workers pull from them straight into their own.

Nothing is copied on the trainer's side, so the trainer must not step before every worker has pulled: `push` returns after that. Handles are
made once for each allocation of the trainer and opened once by each worker; they are made anew when the trainer's storage has moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence, Set

import torch

from instep.digest import MASK, seed_of
from instep.digest_cuda import Run, Table
from instep.errors import SourceError, TransportError
from instep.protocol import Identity, Location, Manifest, TensorMeta
from instep.transport import Me, Published, Pull, driver, elsewhere

EXPANDABLE = (
    "its memory is in expandable segments, which cannot be shared: unset expandable_segments in PYTORCH_ALLOC_CONF "
    "(or PYTORCH_CUDA_ALLOC_CONF) of the trainer"
)


class IpcTransport(Pull):
    """The trainer's side. Tensors that are not contiguous, not of the dtype to send, or no whole number of 8-byte words are staged in
    buffers on the trainer's GPU, which are kept."""

    def __init__(self) -> None:
        self.handles: dict[int, bytes] = {}
        self.staged: dict[str, torch.Tensor] = {}
        self.shared: dict[str, torch.Tensor] = {}  # kept until the next publication: some were made for this one
        self.table: tuple[object, Table, list[TensorMeta]] | None = None

    def consider(self, device: torch.device, workers: Sequence[Identity]) -> str | None:
        if device.type != "cuda":
            return f"the trainer's tensors are on {device.type}"
        other = next((worker.device for worker in workers if not worker.device.startswith("cuda")), None)
        return f"an engine's worker is on {other}" if other else elsewhere(workers)

    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        metas = {meta.name: meta for meta in tensors if not meta.alias_of}
        shared = {name: self._shareable(name, value.detach(), metas) for name, value in values}
        if missing := metas.keys() - shared.keys():
            raise SourceError(f"the source did not give {min(missing)}, which its metadata names", tensor=min(missing))
        self.shared, device = shared, next(iter(shared.values())).device
        bases = {name: driver.allocation(tensor.data_ptr()) for name, tensor in shared.items()}
        self.handles = {base: self.handles.get(base) or _handle(base) for base, _ in bases.values()}
        order = {base: index for index, base in enumerate(self.handles)}
        location = Location(
            transport="ipc",
            address=hashlib.blake2b(b"".join(self.handles.values()), digest_size=16).hexdigest(),
            nbytes=sum(meta.nbytes for meta in metas.values()),
            offsets={name: tensor.data_ptr() - bases[name][0] for name, tensor in shared.items()},
            handles=list(self.handles.values()),
            handle_of={name: order[bases[name][0]] for name in shared},
            live=True,
        )
        self._sum_up(shared, metas, device)
        return Published(location, {})

    def finish(self, published: Published) -> Published:
        """What was summed up meanwhile."""
        assert self.table is not None
        sums, flags = self.table[1].result()
        metas = self.table[2]
        digests = {meta.name: (seed_of(meta) + part) & MASK for meta, part in zip(metas, sums, strict=True)}
        return Published(published.location, digests, tuple(meta.name for meta, flag in zip(metas, flags, strict=True) if flag))

    def _shareable(self, name: str, value: torch.Tensor, metas: dict[str, TensorMeta]) -> torch.Tensor:
        meta = metas.get(name)
        if meta is None or tuple(value.shape) != meta.shape:
            raise SourceError(f"the source gave {name} {list(value.shape)}, which is not what its metadata says", tensor=name)
        if not value.is_cuda:
            raise TransportError(f"{name} is on {value.device}: CUDA IPC shares memory of GPUs")
        dtype = getattr(torch, meta.dtype)
        if value.dtype == dtype and value.is_contiguous() and meta.nbytes % 8 == 0 and value.data_ptr() % 8 == 0:
            return value
        if name not in self.staged or self.staged[name].nbytes < meta.nbytes:
            self.staged[name] = torch.zeros(-(-meta.nbytes // 8), dtype=torch.int64, device=value.device)
        room = self.staged[name].view(torch.uint8)[: meta.nbytes].view(dtype).view(meta.shape)
        room.copy_(value)
        return room

    def _sum_up(self, shared: dict[str, torch.Tensor], metas: dict[str, TensorMeta], device: torch.device) -> None:
        """Waits for the trainer's work, and starts to take digests of the very memory that workers will read."""
        key = tuple((name, tensor.data_ptr()) for name, tensor in shared.items())
        if self.table is None or self.table[0] != key:
            runs = []
            for slot, (name, tensor) in enumerate(shared.items()):
                meta, words = metas[name], -(-metas[name].nbytes // 8)
                runs.append(Run(tensor.data_ptr(), 0, 1, words, words, words, 0, seed_of(meta), slot, meta.dtype))
            self.table = (key, Table(runs, len(runs), device, copy=False), [metas[name] for name in shared])
        torch.cuda.synchronize(device)
        self.table[1].launch()

    def release_all_but(self, held: Set[str]) -> None:
        """The memory is the trainer's own."""

    def close(self) -> None:
        self.staged.clear()
        self.shared.clear()
        self.handles.clear()
        self.table = None


def _handle(base: int) -> bytes:
    try:
        return driver.share(base)
    except TransportError as error:
        raise TransportError(f"the trainer's GPU memory cannot be shared: {EXPANDABLE} ({error.args[0]})") from error


OPENED: dict[bytes, int] = {}
"""Handles that this process has mapped, and where. Opening one twice in a process is an error of the driver."""


class IpcReader:
    """A worker's side, on the worker's current device. Addresses stay mapped from version to version, in `OPENED`."""

    arrived = fetches = False

    def __init__(self, manifest: Manifest, _: Me) -> None:
        if not torch.cuda.is_available():
            raise TransportError("this worker has no GPU: CUDA IPC cannot reach it")
        self.location = manifest.location
        self.device = torch.device("cuda", torch.cuda.current_device())
        opened = OPENED
        with torch.cuda.device(self.device):
            torch.cuda.current_stream(self.device).synchronize()  # makes the context current before the driver is called
            for handle in self.location.handles:
                if handle not in opened:
                    opened[handle] = _attach(handle)
        for handle in opened.keys() - set(self.location.handles):
            driver.detach(opened.pop(handle))
        self.bases = [opened[handle] for handle in self.location.handles]
        self.sums: dict[str, int] = {}

    def address(self, meta: TensorMeta) -> int:
        """Where the tensor's first byte is mapped in this process."""
        name = meta.alias_of or meta.name
        return self.bases[self.location.handle_of[name]] + self.location.offsets[name]

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        """A copy on the engine's own GPU, its digest taken on the way: for layers that take the reload session."""
        words = -(-meta.nbytes // 8)
        room = torch.empty(words, dtype=torch.int64, device=self.device)
        table = Table(
            [Run(self.address(meta), room.data_ptr(), 1, words, words, words, 0, seed_of(meta), 0, meta.dtype)], 1, self.device, copy=True
        )
        table.launch()
        if not meta.alias_of:
            self.sums[meta.name] = table.result()[0][0]
        return room.view(torch.uint8)[: meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        """Nothing: bytes are pulled, and summed up, in the commit."""
        return {}

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
