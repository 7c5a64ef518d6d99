"""Notice when a vLLM worker's weights change by another way than a push.

vLLM can reload its weights from disk, take them over its own weight transfer, and put them to
sleep; a worker extension of the user's can call the model's loader. Each of these ways passes a
method of the worker, of its model runner or of the model. `watch` wraps these methods on the
objects themselves, and no class of vLLM is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instep.engine.vllm.config import chosen
from instep.receiver.state import Receiver


def watch(worker: Any, receiver: Receiver, busy: Callable[[], bool]) -> None:
    """Have `receiver` withdraw its version when something else changes the worker's weights.

    busy: tells whether a push is what runs now.
    """

    def loads(owner: Any, name: str) -> None:
        run = getattr(owner, name, None)
        if run is None:
            return

        def load(*args: Any, **kwargs: Any) -> Any:
            if busy():
                return run(*args, **kwargs)
            try:
                return run(*args, **kwargs)
            finally:  # a load that failed may have written some of the weights
                receiver.withdraw(f"{type(owner).__name__}.{name} changed the weights")

        vars(owner)[name] = load

    loads(worker, "reload_weights")
    loads(worker.model_runner, "reload_weights")
    loads(worker.model_runner.get_model(), "load_weights")
    if not chosen(worker.vllm_config):  # those of the backend `instep` end in the receiver
        loads(worker, "update_weights")
    if getattr(worker.vllm_config.model_config, "enable_sleep_mode", False):
        _watch_sleep(worker, receiver)


def _watch_sleep(worker: Any, receiver: Receiver) -> None:
    fall_asleep, wake = worker.sleep, worker.wake_up

    def sleep(level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level >= 1:
            receiver.asleep = f"vLLM's worker sleeps (level {level}): its weights are not in GPU memory"
        try:
            return fall_asleep(level, *args, **kwargs)
        finally:
            if level >= 2:
                receiver.withdraw(f"sleep(level={level}) discarded the weights")

    def wake_up(tags: list[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        woken = wake(tags, *args, **kwargs)
        if tags is None or "weights" in tags:
            receiver.asleep = None
        return woken

    worker.sleep, worker.wake_up = sleep, wake_up
