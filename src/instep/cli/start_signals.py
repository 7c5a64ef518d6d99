"""Handles SIGTERM and Ctrl-C while vLLM starts.

Both raise KeyboardInterrupt in vLLM then, which catches one itself where it waits for its engine
(0.32): the signal is lost, and the engine starts all the same. Nothing is at stake before it is
there, so the process ends at once, whatever vLLM has set. Afterwards a server has vLLM's handlers,
which let requests end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE = 5.0  # seconds for the engine's processes to end by themselves

_starting = False


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Makes both signals end this process at once until `started` is called. Its children set
    handlers of their own."""
    with suppress(ImportError):
        import psutil  # noqa: F401  (now, and not within a handler)
    global _starting
    _starting, set_handler = True, signal.signal

    def set_behind_ours(number: int, handler: Any) -> Any:
        chained = number in SIGNALS and callable(handler)
        return set_handler(number, behind(handler) if chained else handler)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = {number: behind(handler) for number, handler in before.items()}
    for number in SIGNALS:
        set_handler(number, ours[number])
    signal.signal = set_behind_ours  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler
        started()
        for number in SIGNALS:
            if signal.getsignal(number) is ours[number]:
                set_handler(number, before[number])


def started() -> None:
    """Leaves signals to the handlers that vLLM has set: the engine has started."""
    global _starting
    _starting = False


def behind(handler: Any) -> Any:
    """Returns a handler that ends this process while the engine starts, and calls `handler`
    afterwards."""

    def ours(number: int, frame: Any) -> None:
        if _starting:
            end(number)
        elif callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    return ours


def end(number: int) -> None:
    """Ends the processes that this one has started, and then this one, by the signal."""
    import psutil  # vLLM needs it too

    text = f"instep: {signal.Signals(number).name} while vLLM starts: it ends"
    print(text, file=sys.stderr, flush=True)
    started = psutil.Process().children(recursive=True)
    children = [child for child in started if not _cleans_up(child)]
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    for child in psutil.wait_procs(children, PATIENCE)[1]:
        child.kill()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _cleans_up(child: Any) -> bool:
    """Whether this child is Python's resource tracker, which removes shared memory after all
    others have ended."""
    import psutil

    try:
        return any("resource_tracker" in word for word in child.cmdline())
    except psutil.Error:
        return False
