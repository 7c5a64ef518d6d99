"""Engines as a trainer of the originals has them: Ray actors or objects of this process, with
`update_weight` or `collective_rpc`.

Each call is a future, so that every wait has its bound and a trainer in a collective hears of an
engine that has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from instep.dropin.calls import state_in
from instep.dropin.communicator import Communicator
from instep.errors import ConfigError, EngineState, EngineTimeout, Serving, SyncError

GRACE = 2.0  # seconds that a collective may go on after an engine has failed: it may have taken part

UNKNOWN: Serving = "unknown"

LATE = TimeoutError("no answer in time")


def call(engine: Any, method: str, **arguments: Any) -> Future[Any]:
    """Starts a call. Raises `ConfigError` for an object that is no such engine."""
    found: Any = getattr(engine, method, None)
    if hasattr(found, "remote"):
        future: Future[Any] = found.remote(**arguments).future()
        return future
    if found is not None:
        return in_thread(lambda: found(**arguments))
    if hasattr(engine, "collective_rpc"):
        return in_thread(lambda: engine.collective_rpc(method, kwargs=arguments))
    raise ConfigError(f"{type(engine).__name__} has neither {method} nor collective_rpc: give Ray actors or vLLM's LLM")


def in_thread(action: Callable[[], Any]) -> Future[Any]:
    """A call that does not keep the interpreter from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def meanwhile(group: Communicator, action: Callable[[], None], calls: Sequence[Future[Any]]) -> None:
    """Takes this rank's part in a collective of the engines' calls. An engine that fails without
    taking part ends it."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            failed = next((one.exception() for one in calls if one.done() and one.exception() is not None), None)
            if failed is not None and not over.wait(GRACE):
                group.meeting.call_off(reason := f"an engine failed: {failed}")
                if not over.wait(GRACE):  # all had come
                    group.give_up(reason)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        action()
    finally:
        over.set()


def settle(calls: Sequence[Future[Any]], phase: str, timeout: float) -> list[list[dict[str, Any]]]:
    """What every engine's workers answered, all of them well.

    Raises `EngineTimeout` or `SyncError`, with what is known of each engine.
    """
    wait(calls, timeout=timeout)
    answers = [_answer(one) for one in calls]
    states = tuple(_state(f"engine {index}", phase, answer) for index, answer in enumerate(answers))
    failures = [state for state, answer in zip(states, answers, strict=True) if _error(answer) is not None]
    if failures:
        kind = EngineTimeout if LATE in answers else SyncError
        raise kind(
            f"{len(failures)} of {len(states)} engines failed in {phase}, first {failures[0].engine}: {failures[0].reason}",
            engines=states,
            next_step="mend what is wrong, then send all weights again: the next round begins with the first of them",
        )
    return answers


def _answer(one: Future[Any]) -> Any:
    """The statuses of an engine's workers, its exception, or `LATE`."""
    if not one.done():
        return LATE
    return one.exception() or one.result()


def _error(answer: Any) -> str | None:
    if isinstance(answer, BaseException):
        return str(answer) or type(answer).__name__
    if not isinstance(answer, list) or not answer or not all(isinstance(status, dict) and "ok" in status for status in answer):
        return f"it answered {answer!r}, no list of statuses: its workers need instep's extension, and it must return what they return"
    return next((f"worker {status['rank']}: {status['error']}" for status in answer if not status["ok"]), None)


def _state(engine: str, phase: str, answer: Any) -> EngineState:
    error = _error(answer)
    serving, version = state_in(str(answer)) if isinstance(answer, Exception) else (UNKNOWN, None)
    if isinstance(answer, list) and (statuses := [status for status in answer if isinstance(status, dict) and "dirty" in status]):
        serving = "dirty" if any(status["dirty"] for status in statuses) else "new" if statuses[0]["committed"] else "old"
        version = statuses[0]["version"]
    return EngineState(engine, serving, version, phase if error else None, error)
