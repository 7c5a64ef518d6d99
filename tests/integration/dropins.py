"""What the tests of the drop-ins share: calls in threads, waited for with a bound, and workers that can be told to fail."""

from __future__ import annotations

import runpy
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyExtension

from instep.dropin import open_instruct, vllm_rlhf


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """A call that does not keep the test from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def run_example(name: str, llm: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `examples/NAME`, as it stands, with an engine that is there already."""
    import vllm

    monkeypatch.setattr(vllm, "LLM", lambda **_: llm)
    monkeypatch.setattr(sys, "argv", [name, str(path)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / name), run_name="__main__")


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
