"""Another way from a trainer to its engine: a pipe between two processes instead of TCP or Ray.

    python examples/torchrl_another_rpc.py

TorchRL's page on `VLLMWeightReceiver` shows where another RPC would go; in instep it goes there: one class with `call` on the trainer's
side, one with `serve` on the engine's. What they carry are requests of some kilobytes; the weights go through shared memory as before.

The engine here is a `MemoryEngine`, so that this runs anywhere. Another takes its place as it is:
`vllm.LLM(model=..., worker_extension_cls="instep.engine.vllm_worker.WorkerExtension")`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from instep import MemoryEngine
from instep.dropin.torchrl import VLLMWeightSyncScheme, get_model_metadata
from instep.engine.rpc import GONE, Answer
from instep.errors import EngineLost

LOOK = 0.001  # seconds between two looks for a message


class PipeRpc:
    """The trainer's side. Requests are numbered: an answer that comes after its deadline must not be taken for another one."""

    def __init__(self, pipe: Connection, name: str = "engine") -> None:
        self.pipe, self.name = pipe, name
        self.sent = 0
        self.answers: dict[int, bytes] = {}

    async def call(self, method: str, payload: bytes) -> bytes:
        self.sent += 1
        number = self.sent
        try:
            self.pipe.send_bytes(msgspec.msgpack.encode((number, method, payload)))
            while number not in self.answers:
                if self.pipe.poll():
                    answered, answer = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=tuple[int, bytes])
                    self.answers[answered] = answer
                else:
                    await asyncio.sleep(LOOK)  # where the caller's deadline ends the wait
        except (OSError, EOFError) as error:
            raise EngineLost(f"{self.name} closed the pipe: {error!r}") from error
        return self.answers.pop(number)


class PipeDoor:
    """The engine's side. A thread of its own: updates arrive while the engine generates."""

    problem: str | None = None

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.closed = False

    def serve(self, answer: Answer) -> None:
        threading.Thread(target=lambda: asyncio.run(self._serve(answer)), daemon=True).start()

    def close(self) -> None:
        self.closed = True

    async def _serve(self, answer: Answer) -> None:
        running: set[asyncio.Task[None]] = set()  # one that hangs must not keep the others from being answered
        try:
            while not self.closed:
                if self.pipe.poll():
                    task = asyncio.create_task(self._reply(answer, self.pipe.recv_bytes()))
                    running.add(task)
                    task.add_done_callback(running.discard)
                else:
                    await asyncio.sleep(LOOK)
        except (OSError, EOFError) as error:
            self.problem = f"the trainer closed the pipe: {error!r}"
        await answer(GONE, b"")

    async def _reply(self, answer: Answer, request: bytes) -> None:
        number, method, payload = msgspec.msgpack.decode(request, type=tuple[int, str, bytes])
        self.pipe.send_bytes(msgspec.msgpack.encode((number, await answer(method, payload))))


def engine_process(pipe: Connection, scheme: VLLMWeightSyncScheme, metadata: Any) -> None:
    engine = MemoryEngine({name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in metadata.items()})
    receiver = scheme.create_receiver(engine)
    receiver.register_worker_transport(PipeDoor(pipe))
    receiver.init_all_workers_group(metadata)
    while receiver.poll_and_apply(timeout=5):
        print(f"engine: {engine.version} says {engine.generate([1, 2, 3], max_tokens=4)}", flush=True)


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    metadata = get_model_metadata(model)
    scheme = VLLMWeightSyncScheme()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine_process, args=(theirs, scheme, metadata))
    process.start()
    theirs.close()

    sender = scheme.create_sender()
    sender.register_model(model)
    sender.register_worker(0, PipeRpc(ours))
    sender.init_all_workers_group(metadata)
    for step in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        print(f"trainer: {sender.update_weights()}", flush=True)
    process.join(60)


if __name__ == "__main__":
    main()
