"""Memory of one process in another, by a handle of plain fields: no function that comes with a
handle is ever called.

A GPU's memory is shared as PyTorch shares it between processes, CPU memory as a segment of
`transport/shm/`.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from instep.dropin.communicator import dtype_of
from instep.errors import PlanError, TransportError
from instep.protocol import dtype_name
from instep.transport import uuid_of
from instep.transport.shm import segment as shm

FIELDS = 15  # arguments of `rebuild_cuda_tensor`
CLASSES = (0, 4)  # of them, the classes of tensor and storage
DTYPE, DEVICE, GRADIENT = 5, 6, 10
PLAIN = (int, bool, bytes, type(None))
SEGMENT = "segment"
Handle = tuple[Any, Sequence[Any]]
Handles = Mapping[str, Handle] | Sequence[Any] | None
"""By the UUIDs of GPUs, or a list: of such mappings, of pairs (UUID, handle), or of a handle for
each worker, by rank."""


def rebuild_ipc(handle: Handle, device_id: int | None = None) -> torch.Tensor:
    """The tensor that `torch.multiprocessing.reductions.reduce_tensor` made a handle of, or
    `share`.

    device_id: the number by which this process knows the GPU, where it differs from the sender's.
    Raises `TransportError` for a handle that is neither, or that cannot be opened here.
    """
    what, fields = handle
    if what == SEGMENT:
        return _open_segment(*fields)
    if what not in (reductions.rebuild_cuda_tensor, "rebuild_cuda_tensor") or len(fields) != FIELDS:
        raise TransportError(f"{what!r} with {len(fields)} fields is no handle of a CUDA tensor: only those of reduce_tensor are opened")
    size, stride = fields[1], fields[2]
    plain = [field for index, field in enumerate(fields) if index not in (*CLASSES, 1, 2, DTYPE)]
    if not all(isinstance(field, PLAIN) for field in (*plain, *size, *stride)):
        raise TransportError("the handle has a field that is neither a number nor bytes")
    own: list[Any] = list(fields)
    own[0], own[1], own[2], own[4], own[DTYPE] = (
        torch.Tensor,
        torch.Size(size),
        tuple(stride),
        torch.storage.TypedStorage,
        dtype_of(own[DTYPE]),
    )
    own[DEVICE] = own[DEVICE] if device_id is None else device_id
    own[GRADIENT] = False
    try:
        tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*own)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise TransportError(
            f"the trainer's GPU memory cannot be opened from this worker: {error}",
            next_step="trainer and worker must be on one GPU, and in a container share its IPC namespace",
        ) from error
    return tensor


def rebuild_tensor(handle: Handle, dtype: torch.dtype, shape: tuple[int, ...], device_id: int | None) -> torch.Tensor:
    """The tensor of a handle, which must be of this dtype and shape. A segment holds it from its
    first byte on."""
    tensor = rebuild_ipc(handle, device_id)
    if handle[0] == SEGMENT:
        tensor = tensor[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
        raise PlanError(f"the handle is of a {dtype_name(tensor.dtype)} of shape {list(tensor.shape)}, announced was {dtype} {list(shape)}")
    return tensor


def share(tensor: torch.Tensor) -> Handle:
    """A handle of a CUDA tensor that travels without pickle. The tensor must live until the other
    side is done with it."""
    if not tensor.is_cuda:
        raise TransportError(f"a tensor on {tensor.device} has no CUDA handle")
    fields: list[Any] = list(reductions.reduce_tensor(tensor.detach())[1])  # type: ignore[no-untyped-call]
    for index in CLASSES:
        fields[index] = None
    fields[1], fields[2], fields[DTYPE] = list(fields[1]), list(fields[2]), dtype_name(fields[DTYPE])
    return "rebuild_cuda_tensor", fields


def mine(handles: Mapping[str, Any], device_id: str) -> Any:
    """What is meant for this device, whether or not its UUID is written with `GPU-`. Raises
    `PlanError` with those that are there."""
    for other, value in handles.items():
        if other.removeprefix("GPU-") == device_id.removeprefix("GPU-"):
            return value
    raise PlanError(f"nothing is meant for this worker's device {device_id}: there is something for {', '.join(handles) or 'nobody'}")


def of_worker(handles: Handles, device_id: str, rank: int) -> Handle:
    """The handle that is meant for a worker. Raises `PlanError` as `mine` does."""
    if isinstance(handles, Mapping):
        found: Handle = mine(handles, device_id)
        return found
    named: dict[str, Handle] = {}
    for place, one in enumerate(handles or ()):
        named |= one if isinstance(one, Mapping) else dict([one]) if _is_pair(one) else {device_id: one} if place == rank else {}
    return mine(named, device_id)  # type: ignore[no-any-return]


def _is_pair(one: Any) -> bool:
    """Whether this is a GPU's UUID and a handle, and no handle."""
    return isinstance(one[0], str) and len(one[1]) == 2 and isinstance(one[1][1], tuple | list)


def device_id(device: torch.device) -> str:
    """The UUID of a GPU, whatever number the process knows it by; this process's own name for the
    CPU."""
    uuid = uuid_of(device)
    return f"GPU-{uuid}" if uuid else f"CPU-{os.getpid()}"


def _open_segment(name: str, size: int) -> torch.Tensor:
    if not shm.NAME.fullmatch(name):
        raise TransportError(f"{name!r} is not a segment's name")
    try:
        file = os.open(shm.directory() / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(
            f"cannot open the trainer's shared memory {name}: {error.strerror}",
            next_step="trainer and engine must be on one host and share /dev/shm",
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(np.frombuffer(mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8))
    except (OSError, ValueError) as error:
        raise TransportError(f"segment {name} does not have {size} bytes: {error}") from error
    finally:
        os.close(file)
