"""Another way from a trainer to its engine: `torch.distributed.rpc` instead of TCP, a pipe or Ray.

    python examples/torchrl_another_rpc.py

TorchRL's page on `VLLMWeightReceiver` shows where another RPC would go; in instep it goes there:
one class with `call` on the trainer's side, and one function on the engine's. What they carry are
requests of some kilobytes; the weights go through shared memory as before.

The engine here is a `MemoryEngine`, so that this runs anywhere. Another takes its place as it is:
`vllm.LLM(model=..., worker_extension_cls="instep.vllm.WorkerExtension")`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from typing import Any

import torch
from torch.distributed import rpc

from instep import MemoryEngine
from instep.dropin.torchrl import VLLMWeightReceiver, VLLMWeightSyncScheme, get_model_metadata
from instep.errors import EngineLost

PATIENCE = 30.0  # seconds
receiver: VLLMWeightReceiver


def answer(method: str, payload: bytes) -> bytes:
    """Runs in the engine's process, in a thread of the RPC's."""
    return receiver.answer(method, payload)


class TorchRpc:
    """The trainer's side. `name` is the engine's name in errors and receipts."""

    def __init__(self, worker: str) -> None:
        self.name = worker

    async def call(self, method: str, payload: bytes) -> bytes:
        try:
            future = rpc.rpc_async(self.name, answer, (method, payload), timeout=PATIENCE)
            return await asyncio.to_thread(future.wait)
        except RuntimeError as error:
            raise EngineLost(f"{self.name} gave no answer: {error}") from error


def engine_process(address: str, scheme: VLLMWeightSyncScheme, metadata: Any) -> None:
    global receiver
    engine = MemoryEngine({name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in metadata.items()})
    receiver = scheme.create_receiver(engine)
    rpc.init_rpc("engine", rank=1, world_size=2, rpc_backend_options=options(address))
    receiver.init_all_workers_group(metadata)
    while receiver.poll_and_apply(timeout=5):
        print(f"engine: {engine.version} says {engine.generate([1, 2, 3], max_tokens=4)}", flush=True)
    rpc.shutdown()


def options(address: str) -> rpc.TensorPipeRpcBackendOptions:
    return rpc.TensorPipeRpcBackendOptions(init_method=address, rpc_timeout=PATIENCE)


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    metadata = get_model_metadata(model)
    scheme = VLLMWeightSyncScheme()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    process = multiprocessing.get_context("spawn").Process(target=engine_process, args=(address, scheme, metadata))
    process.start()

    rpc.init_rpc("trainer", rank=0, world_size=2, rpc_backend_options=options(address))
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.register_worker(0, TorchRpc("engine"))
    sender.init_all_workers_group(metadata)
    for step in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        print(f"trainer: {sender.update_weights()}", flush=True)
    rpc.shutdown()
    process.join(60)


if __name__ == "__main__":
    main()
