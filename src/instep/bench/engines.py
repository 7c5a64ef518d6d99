"""`python -m instep.bench.engines [--over memory|http|ray] [COUNT ...]`: what a push costs as
engines are added.

Each line tells, for a number of engines in memory that hold 20 tensors of 1 KiB: milliseconds of a
push that is not the first (median of 7), and of the longest pause of an engine in it. By default
there are 1, 64 and 256 engines, all in this process. Over HTTP each stands behind a server of its
own in this process, and over Ray each is an actor; a fleet of 8 is the default there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from instep import MemoryEngine, WeightSync

TENSORS, SIDE, PUSHES = 20, 16, 7


def weights() -> dict[str, torch.Tensor]:
    return {f"model.layers.{index}.mlp.down_proj.weight": torch.randn(SIDE, SIDE) for index in range(TENSORS)}


@contextmanager
def in_memory(count: int) -> Iterator[Sequence[Any]]:
    start = weights()
    yield [MemoryEngine(start, name=f"memory-{index}") for index in range(count)]


@contextmanager
def over_http(count: int) -> Iterator[Sequence[Any]]:
    """Starts servers in threads of this process, at free ports of the loopback."""
    import threading

    import uvicorn

    from instep.engine.remote.http_control import Control, Served

    async def nothing_else(*_: Any) -> None: ...

    start, servers = weights(), []
    for index in range(count):
        app = Control(nothing_else, partial(_of, Served(MemoryEngine(start, name=f"memory-{index}"), None)))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        threading.Thread(target=server.run, daemon=True).start()
        servers.append(server)
    try:
        yield [f"http://127.0.0.1:{_port(server)}" for server in servers]
    finally:
        for server in servers:
            server.should_exit = True


def _of(served: Any, _: Any) -> Any:
    return served


def _port(server: Any) -> int:
    import time

    while not server.started:
        time.sleep(0.01)
    return int(server.servers[0].sockets[0].getsockname()[1])


@contextmanager
def over_ray(count: int) -> Iterator[Sequence[Any]]:
    import ray

    with ExitStack() as until:
        ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False)
        until.callback(ray.shutdown)
        start, actor = weights(), ray.remote(MemoryEngine)
        yield [actor.options(num_cpus=0).remote(start) for _ in range(count)]


FLEETS: dict[str, tuple[Callable[[int], Any], tuple[int, ...]]] = {
    "memory": (in_memory, (1, 64, 256)),
    "http": (over_http, (1, 8)),
    "ray": (over_ray, (1, 8)),
}
"""How each fleet is made, and how many engines it has by default."""


def measure(over: str, count: int, pushes: int = PUSHES) -> tuple[float, float]:
    """Returns the seconds of a push, and of the longest pause in it: medians, without the first
    pushes."""
    source = weights()
    with FLEETS[over][0](count) as engines, WeightSync(source, engines) as sync:
        totals, pauses = [], []
        for push in range(2 + pushes):
            for tensor in source.values():
                tensor.add_(1)
            started = perf_counter()
            receipt = sync.push(f"v{push}")
            totals.append(perf_counter() - started)
            pauses.append(receipt.pause)
    return median(totals[2:]), median(pauses[2:])


def main(arguments: Sequence[str]) -> None:
    over = arguments[1] if arguments[:1] == ["--over"] and arguments[1:2] else "memory"
    given = arguments[2:] if arguments[:1] == ["--over"] else arguments
    if over not in FLEETS or not all(count.isdigit() for count in given):
        sys.exit(str(__doc__))
    for count in map(int, given or map(str, FLEETS[over][1])):
        seconds, pause = measure(over, count)
        print(f"{over:6} {count:4} engines: {1e3 * seconds:7.1f} ms, longest pause {1e3 * pause:7.1f} ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
