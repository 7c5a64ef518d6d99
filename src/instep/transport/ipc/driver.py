"""The calls of CUDA's driver that share memory between processes, on plain integers and bytes.

PyTorch's own sharing counts references through files and pickles what it sends; these handles are
64 bytes, need no counting, and are opened once.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from instep.errors import TransportError

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"CUDA's driver library cannot be loaded: {error}") from error
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise TransportError(f"{name} failed with {status}: {(text.value or b'unknown error').decode()}")


def allocation(address: int) -> tuple[int, int]:
    """Returns base address and size in bytes of the allocation that contains an address."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def share(base: int) -> bytes:
    """Returns a handle with which another process of this host opens the allocation. Raises
    `TransportError` where it cannot be shared."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def attach(handle: bytes) -> int:
    """Maps a shared allocation for the current device, with peer access if it lies on another one.
    Returns its address in this process."""
    address, struct = ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(struct), handle, HANDLE_BYTES)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), struct, LAZY_PEER_ACCESS)
    return address.value


def read(address: int, nbytes: int) -> bytes:
    """Copies bytes at an address of GPU memory, own or mapped, to the host. A context must be
    current in this thread."""
    room = ctypes.create_string_buffer(nbytes)
    _call("cuMemcpyDtoH_v2", room, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
    return room.raw


def detach(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
