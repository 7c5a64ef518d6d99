"""What the tests of drop-ins and of trainers in other processes share: calls in threads, waited for with a bound, trainers of two
ranks, and workers that can be told to fail."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import SETTINGS, Generated, greedy
from faulty import FaultyExtension
from models import PROMPTS

from instep.dropin import answers, open_instruct, vllm_rlhf
from instep.dropin.vllm_rlhf import ColocateSender, Communicator, stateless_init_process_group

CPU = torch.device("cpu")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """A call that does not keep the test from ending."""
    return answers.in_thread(lambda: call(*args, **kwargs))


def run_example(name: str, llm: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `examples/NAME`, as it stands, with an engine that is there already."""
    import vllm

    monkeypatch.setattr(vllm, "LLM", lambda **_: llm)
    monkeypatch.setattr(sys, "argv", [name, str(path)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / name), run_name="__main__")


def two_ranks(program: str, folder: Path, family: str, checkpoint: Path) -> list[dict[str, Any]]:
    """Runs a trainer of this directory as two processes with DeepSpeed; rank 0 starts a vLLM from `checkpoint`. What each rank saw."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'instep[deepspeed]'")
    here, out = Path(__file__).parent, folder / "results"
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **SETTINGS, "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    arguments = [str(free_port()), family, str(checkpoint)]
    logs = [folder / f"log.{rank}" for rank in range(2)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            command = [sys.executable, str(here / program), str(out), str(rank), *arguments]
            started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + 500
    try:
        while None in (codes := [process.poll() for process in started]) and time.monotonic() < deadline:
            if any(codes):  # the other rank would wait for this one
                break
            time.sleep(0.1)
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


def error_of(answer: Future[Any], seconds: float = 60) -> str:
    """What an engine says went wrong: one worker raises, several return it."""
    try:
        statuses = answer.result(seconds)
    except Exception as error:
        return str(error)
    errors = [status["error"] for status in statuses if not status["ok"]]
    assert errors, statuses
    return str(errors)


class FaultyRlhf(vllm_rlhf.WorkerExtension, vllm_rlhf.ColocateWorkerExtension, FaultyExtension):
    """vLLM's examples, both in one worker, with `inject`."""

    def init_weight_update_group(self, *args: Any) -> Any:
        self.faulty_receiver()
        return super().init_weight_update_group(*args)


class FaultyWrap(open_instruct.WorkerWrap, FaultyExtension):
    """Open Instruct's, with `inject`."""

    def init_process_group(self, *args: Any, **kwargs: Any) -> Any:
        self.faulty_receiver()
        return super().init_process_group(*args, **kwargs)


@dataclass
class Served:
    """An engine, and what it should generate with the weights of seed 2: what a fresh one does that loads them from disk."""

    llm: Any
    family: str
    workers: int
    fresh: Generated

    def call(self, method: str, *args: Any) -> Any:
        return in_thread(self.llm.collective_rpc, method, args=args)

    def generated(self) -> Generated:
        self.llm.reset_prefix_cache()
        return greedy(self.llm, PROMPTS)


def join(served: Served, timeout: float = 60) -> Communicator:
    """As the examples do it: all ranks at once."""
    port, size = free_port(), 1 + served.workers
    joining = served.call("init_weight_update_group", "127.0.0.1", port, 1, size, timeout)
    group = stateless_init_process_group("127.0.0.1", port, 0, size, CPU, timeout)
    assert all(status["ok"] for status in joining.result(60))
    return group


def update(served: Served, group: Communicator, model: Any, but: str = "") -> Any:
    """The examples' loop. The statuses of the last call."""
    for name, p in model.named_parameters():
        if name != but:
            handle = served.call("update_weight", name, str(p.dtype).removeprefix("torch."), p.shape)
            group.broadcast(p, src=0, stream=None)
            statuses = handle.result(60)
    return statuses


def listed(model: Any, names: list[str]) -> Any:
    """A model that lists these weights, in this order."""
    return SimpleNamespace(named_parameters=lambda: [(name, model.get_parameter(name)) for name in names])


def colocated(served: Served, source: Any, version: str | None = None) -> tuple[Any, list[Any]]:
    """One sender for each worker, as there is one trainer for each GPU. What the engine and the senders say."""
    senders = [ColocateSender(source, device, timeout=60) for device in served.llm.collective_rpc("report_device_id")]
    handles = {device: address for sender in senders for device, address in sender.get_zmq_handles().items()}
    return served.call("update_weights_from_ipc", handles, 60), [in_thread(sender.update_weights, version) for sender in senders]
