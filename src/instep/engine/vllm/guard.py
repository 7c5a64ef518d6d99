"""Keeps a vLLM worker that holds parts of two versions from running its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instep.errors import EngineDirty


def refuse_while(worker: Any, dirty: Callable[[], str | None], before_new: Callable[[], None] = lambda: None) -> None:
    """Makes each step of the worker raise `EngineDirty` while `dirty` gives a reason. This ends
    the engine: better than tokens of two versions.

    before_new: called before a step that begins with new requests.

    Steps without tokens go on: with one of these vLLM tells its workers which requests have ended,
    also of a paused engine.
    """

    def check() -> None:
        if (reason := dirty()) is not None:
            raise EngineDirty(f"rank {worker.rank} holds parts of two versions and refuses to run: {reason}")

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.scheduled_new_reqs:
            before_new()
        if scheduler_output.total_num_scheduled_tokens:
            check()
        return run(scheduler_output, *args, **kwargs)

    def execute_dummy_batch(*args: Any, **kwargs: Any) -> Any:
        check()
        return run_dummy(*args, **kwargs)

    run, run_dummy = worker.execute_model, worker.execute_dummy_batch
    worker.execute_model, worker.execute_dummy_batch = execute_model, execute_dummy_batch
