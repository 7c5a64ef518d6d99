"""Measures the memory that a push takes at its peak, on every GPU or, without one, on the host."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from instep.transport.shm.segment import directory

Held = dict[str, int]
"""Bytes in use by place."""
INTERVAL = 0.005


def held(pids: Sequence[int]) -> Held:
    """Returns all memory in use on each GPU. Without one, returns the private memory of the
    processes plus the RAM disk that holds the segments."""
    if torch.cuda.is_available():
        infos = {f"GPU {device}": torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())}
        return {place: total - free for place, (free, total) in infos.items()}
    disk = os.statvfs(directory())
    return {"host": sum(map(private, set(pids))) + (disk.f_blocks - disk.f_bfree) * disk.f_frsize}


def private(pid: int) -> int:
    """Returns the bytes of a process's anonymous resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def trim() -> None:
    """Returns unused GPU memory to the driver, so that later allocations are visible."""
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def peak(pids: Sequence[int], base: Held) -> Iterator[Held]:
    """Yields a dict that is filled with the peaks beyond `base`, sampled every few milliseconds."""
    found = dict.fromkeys(base, 0)

    def look() -> None:
        for place, nbytes in held(pids).items():
            found[place] = max(found[place], nbytes - base[place])

    with watching(look):
        yield found


@contextmanager
def watching(look: Callable[[], None]) -> Iterator[None]:
    """Calls `look` again and again in a thread while it lasts, and once more at its end."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        look()
