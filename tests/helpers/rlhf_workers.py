"""Workers with the extensions of vLLM's examples, on toy models, called as vLLM calls its own: see `vllm_stub.Executor`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from helpers.toys import attention
from helpers.vllm_stub import Executor
from instep.dropin.answers import in_thread
from instep.dropin.vllm_rlhf import ColocateWorkerExtension, Communicator, WorkerExtension, stateless_init_process_group
from instep.engine.memory import MemoryEngine
from instep.engine.vllm.peers import Peers
from instep.receiver.state import Receiver

CPU = torch.device("cpu")


class Bare:
    """What the extensions use of vLLM's worker."""

    device = CPU

    def __init__(self, host: Any, size: int, store: Any) -> None:
        self.rank = host.rank
        parallel = SimpleNamespace(world_size=size, distributed_executor_backend="mp", data_parallel_index=0)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        peers = {purpose: Peers(host.rank, size, PrefixStore(purpose, store), 10) for purpose in ("rounds", "calls")}
        vars(self).update(instep_receiver=Receiver(host), instep_peers=peers)
        self.steps = 0

    def execute_model(self, _: Any) -> None:
        self.steps += 1

    def execute_dummy_batch(self) -> None:
        self.steps += 1


class Worker(Bare, WorkerExtension, ColocateWorkerExtension): ...


class Engine:
    """Serves `attention(1)` at first."""

    def __init__(self, size: int, kind: type[Any] = Worker) -> None:
        self.memory = MemoryEngine(attention(1), tp=size)
        store = HashStore()
        self.workers = [kind(host, size, store) for host in self.memory.hosts]
        self.call = Executor(self.workers).call

    def starts(self, method: str, *args: Any) -> Any:
        return in_thread(lambda: self.call(method, *args))

    @contextmanager
    def joined(self, timeout: float = 20) -> Iterator[Communicator]:
        """The trainer's place in a group with all workers."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        size = 1 + len(self.workers)
        joining = self.starts("init_weight_update_group", "127.0.0.1", port, 1, size, timeout)
        group = stateless_init_process_group("127.0.0.1", port, 0, size, CPU, timeout)
        joining.result(30)
        yield group
        group.close()
        for worker in self.workers:
            vars(worker).pop("model_update_group").close()

    def request(self) -> None:
        self.call("execute_model", SimpleNamespace(scheduled_new_reqs=["one"], total_num_scheduled_tokens=3))

    def serves(self, seed: int) -> bool:
        return self.memory.fingerprint() == MemoryEngine(attention(seed), tp=len(self.workers)).fingerprint()
