"""An engine whose one worker is another process, on any device: a `MemoryHost` behind a pipe. It starts in seconds."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

Shapes = dict[str, tuple[int, ...]]


def _serve(pipe: Any, shapes: Shapes, dtype: torch.dtype, device: str) -> None:
    from instep.engine.memory_host import MemoryHost
    from instep.receiver.state import Receiver

    faulthandler.enable()
    if device != "cpu":
        torch.cuda.set_device(device)
    with torch.device(device):
        host = MemoryHost({name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}, 0, 1)
    host.device = device
    receiver = Receiver(host)
    while True:
        method, payload = pipe.recv()
        if method == "stop":
            return
        if method == "weights":
            pipe.send({name: param.detach().cpu() for name, param in host.model.named_parameters()})
        elif method == "fail":
            raise SystemExit(1)
        else:
            faulthandler.dump_traceback_later(30)  # where it waits
            pipe.send(receiver.handle(method, payload))
            faulthandler.cancel_dump_traceback_later()


class FarEngine:
    """checkpoint: what the engine is built for; its first weights are zeros."""

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], device: str, name: str = "far") -> None:
        self.name = name
        self.version: str | None = None
        self.refusal: str | None = None
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        shapes = {key: tuple(tensor.shape) for key, tensor in checkpoint.items()}
        dtype = next(iter(checkpoint.values())).dtype
        self.process = context.Process(target=_serve, args=(theirs, shapes, dtype, device), daemon=True)
        self.process.start()
        self.thread = ThreadPoolExecutor(max_workers=1)

    def ask(self, method: str, payload: bytes = b"", seconds: float = 60.0) -> Any:
        self.pipe.send((method, payload))
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"{self.name} did not answer {method}")
        return self.pipe.recv()

    async def call(self, method: Any, payload: bytes) -> list[bytes]:
        return [await asyncio.get_running_loop().run_in_executor(self.thread, self.ask, method, payload)]

    async def pause(self, caches: Any) -> None: ...

    async def resume(self) -> None: ...

    async def label(self, version: str) -> None:
        self.version = version

    async def score(self, token_ids: list[int]) -> list[float]:
        return [0.0 for _ in token_ids[1:]]

    async def refuse(self, reason: str | None) -> None:
        self.refusal = reason

    def holds(self, checkpoint: Mapping[str, torch.Tensor]) -> bool:
        """Whether its worker has what a fresh one has that loads the checkpoint, bit for bit."""
        from instep.engine.memory_host import MemoryHost

        host = MemoryHost(checkpoint, 0, 1)
        with host.reload():
            host.load([(key, tensor.cpu()) for key, tensor in checkpoint.items()])
        found = self.ask("weights")
        return all(torch.equal(found[key], param.detach().cpu()) for key, param in host.model.named_parameters())

    def stop(self) -> None:
        with suppress(OSError):  # it may be gone
            self.pipe.send(("stop", b""))
        self.process.join(10)
        self.process.kill()
