"""An engine and its receiver in a process of their own, for the tests of the drop-in for TorchRL. They are told what to do over a pipe."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engines import SETTINGS, greedy, start
from models import PROMPTS

from instep.bench.subjects import stop_vllm

PATIENCE = 300.0  # seconds: an engine starts within them on a machine that is busy


class EngineProcess:
    """`do("generate")` and the others of `Commands`. Raises what the command raised over there."""

    def __init__(self, folder: Path, config: dict[str, Any], metadata: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(folder), config, metadata))
        self.process.start()
        theirs.close()
        assert self.answer() == "started"

    def send(self, command: str, *args: Any) -> None:
        self.pipe.send((command, args))

    def answer(self) -> Any:
        assert self.pipe.poll(PATIENCE), "the engine's process does not answer"
        result = self.pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def do(self, command: str, *args: Any) -> Any:
        self.send(command, *args)
        return self.answer()

    def end(self) -> None:
        if self.process.is_alive():
            try:
                self.do("stop")
            except (OSError, EOFError, AssertionError):
                self.process.kill()
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()


class Commands:
    def __init__(self, folder: str, config: dict[str, Any], metadata: Any) -> None:
        from instep.dropin.torchrl import VLLMWeightSyncScheme

        self.llm = start(Path(folder), worker_extension_cls="faulty.FaultyExtension")
        self.metadata = metadata
        self.receiver = VLLMWeightSyncScheme(**config).create_receiver(self.llm)

    def join(self) -> None:
        self.receiver.init_all_workers_group(self.metadata)

    def stop_waiting_after(self, seconds: float) -> None:
        self.receiver._scheme.timeout = seconds

    def generate(self) -> Any:
        return greedy(self.llm, PROMPTS)

    def poll(self, seconds: float) -> bool:
        return self.receiver.poll_and_apply(seconds)

    def inject(self, point: str, value: float) -> Any:
        return self.llm.collective_rpc("inject", args=(point, value))

    def stop(self) -> None:
        self.receiver.shutdown()
        stop_vllm(self.llm)


def serve(pipe: Connection, folder: str, config: dict[str, Any], metadata: Any) -> None:
    # The engine within this process: one import of vLLM fewer.
    os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    try:
        commands = Commands(folder, config, metadata)
        pipe.send("started")
    except Exception as error:
        pipe.send(RuntimeError(repr(error)))
        return
    command = ""
    while command != "stop":
        command, args = pipe.recv()
        try:
            pipe.send(getattr(commands, command)(*args))
        except Exception as error:
            pipe.send(type(error)(str(error)))
    os._exit(0)
