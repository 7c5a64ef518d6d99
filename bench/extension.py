"""What the benchmark adds to instep's worker extension: the other ways to bring weights in, in the same worker."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from instep.engine.vllm_worker import VllmHost, WorkerExtension


class BenchExtension(WorkerExtension):
    def bench_pid(self) -> int:
        return os.getpid()

    def bench_hold(self, folder: str) -> None:
        from safetensors.torch import load_file

        self.__dict__["bench_held"] = {
            name: t.clone() for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()
        }

    def bench_drop(self) -> None:
        self.__dict__.pop("bench_held")

    def bench_reload_held(self) -> float:
        started = time.perf_counter()
        host = VllmHost(self)
        with host.reload():
            host.load(self.__dict__["bench_held"].items())
        return time.perf_counter() - started

    def bench_join(self, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
        self.__dict__["bench_group"] = (dist.ProcessGroupGloo(dist.PrefixStore("bench", store), 1, 2, timedelta(seconds=60)), store)

    def bench_receive(self, described: list[Any]) -> float:
        started = time.perf_counter()
        group = self.__dict__["bench_group"][0]
        host = VllmHost(self)
        with host.reload():
            for name, dtype, shape in described:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                group.broadcast(tensor, 0).wait()
                host.load([(name, tensor)])
        return time.perf_counter() - started
