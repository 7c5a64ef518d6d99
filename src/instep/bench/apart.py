"""An engine in memory whose workers are separate processes, so that their memory and work are
not counted as the trainer's."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from instep.digest import MASK
from instep.protocol import Method

SECONDS = 120.0


def serve(pipe: Any, metas: dict[str, tuple[tuple[int, ...], str]], rank: int, size: int) -> None:
    """Runs a worker's process."""
    from instep.engine.memory_host import MemoryHost
    from instep.receiver.state import Receiver

    torch.set_num_threads(1)
    host = MemoryHost({name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in metas.items()}, rank, size)
    receiver = Receiver(host)
    while (asked := pipe.recv()) is not None:
        pipe.send(host.fingerprint() if asked == "fingerprint" else receiver.handle(*asked))


class Apart:
    """An engine with workers in separate processes. checkpoint: the tensors it is built for; its
    first weights are others. tp: number of workers."""

    name = "memory"

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], tp: int) -> None:
        context = multiprocessing.get_context("spawn")
        metas = {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in checkpoint.items()}
        self.pipes, self.processes = [], []
        for rank in range(tp):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, metas, rank, tp), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.threads = ThreadPoolExecutor(max_workers=tp)

    def fingerprint(self) -> int:
        """Returns a number that depends on every bit of every worker's weights."""
        total: int = sum(self._ask(pipe, "fingerprint") for pipe in self.pipes)
        return total & MASK

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        loop = asyncio.get_running_loop()
        calls = (loop.run_in_executor(self.threads, self._ask, pipe, (method, payload)) for pipe in self.pipes)
        return list(await asyncio.gather(*calls))

    def _ask(self, pipe: Any, what: Any) -> Any:
        pipe.send(what)
        if not pipe.poll(SECONDS):
            raise TimeoutError("a worker of the engine does not answer")
        return pipe.recv()

    async def pause(self, caches: str) -> None: ...

    async def resume(self) -> None: ...

    async def label(self, version: str) -> None: ...

    async def score(self, token_ids: list[int]) -> list[float]:
        return [0.0 for _ in token_ids[1:]]

    async def refuse(self, reason: str | None) -> None: ...

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)
            process.kill()
