"""Calls that all workers of an engine run at once: what each returns, and which of them raises.

One worker raises for all (see `engine/vllm/backend.py`: vLLM loses step with replies after several
have). So a caller hears of a failure in any worker also where it looks at no answer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from instep.dropin.communicator import DEADLINE
from instep.engine.vllm.peers import Peers, as_instep, speaks
from instep.errors import InstepError, Serving
from instep.protocol import WorkerReceipt

P = ParamSpec("P")
T = TypeVar("T")

Status = dict[str, Any]
"""What a worker method returns: `ok`, `error` (text or None), `rank`, `version` (what the worker
serves now), `committed` (by this call), `dirty` (why the model must not run, or None)."""

SERVES = re.compile(r'the engine (?:(holds parts of two versions)|serves (?:"([^"]*)"|its first weights))')


def by_all(method: Callable[Concatenate[Any, P], WorkerReceipt | None]) -> Callable[Concatenate[Any, P], Status]:
    """A worker method that answers with a `Status`. Arguments that do not fit are an error like any
    other."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Status:
        return _status(self, lambda: method(self, *args, **kwargs))

    return call


def in_turn(method: Callable[Concatenate[Any, P], WorkerReceipt | None]) -> Callable[Concatenate[Any, P], Status]:
    """As `by_all`, for a method that receives one broadcast. The worker takes part in it whatever
    goes wrong: the trainer would wait."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Status:
        group = vars(self).get("model_update_group")
        turns = group.turns if group is not None else 0

        def run() -> WorkerReceipt | None:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                if group is not None and group.turns == turns:
                    with suppress(InstepError):  # the first error is the one to tell
                        group.skip()
                raise

        return _status(self, run)

    return call


def _status(worker: Any, action: Callable[[], WorkerReceipt | None]) -> Status:
    receipt, failure = with_one_voice(worker, action)
    version, dirty = _served(worker)
    return {
        "ok": failure is None,
        "error": None if failure is None else str(as_instep(failure)),
        "rank": worker.rank,
        "version": version,
        "committed": receipt is not None,
        "dirty": dirty,
    }


def with_one_voice(worker: Any, action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What the action returns in this worker, or its error where another worker raises it."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    own = None if failure is None else as_instep(failure)
    told = peers_of(worker, "calls").end(own)
    if told is not None and own is None and (rounds := vars(worker).get("instep_rounds")) is not None:
        rounds.fail_too(told)
    if told is not None and speaks(worker):
        raise _saying(failure if told is own and failure is not None else told, *_served(worker)) from failure
    return result, failure


def peers_of(worker: Any, purpose: str) -> Peers:
    """Returns the worker's peers for one purpose, always the same."""
    held: dict[str, Peers] = vars(worker).setdefault("instep_peers", {})
    if purpose not in held:
        held[purpose] = Peers.of(worker, purpose, DEADLINE)
    return held[purpose]


def state_in(text: str) -> tuple[Serving, str | None]:
    """What the engine serves by an error that crossed its RPC as text."""
    if (found := SERVES.search(text)) is None:
        return "unknown", None
    return ("dirty", None) if found[1] else ("old", found[2])


def _served(worker: Any) -> tuple[str | None, str | None]:
    """The version, and why the model must not run."""
    rounds: Any = vars(worker).get("instep_rounds")
    return (rounds.receiver.version, rounds.together.dirty()) if rounds else (None, None)


def _saying(error: Exception, version: str | None, dirty: str | None) -> Exception:
    """The error, with what the engine serves."""
    if not isinstance(error, InstepError):
        return error
    state = "holds parts of two versions" if dirty else f'serves "{version}"' if version else "serves its first weights"
    said = copy.copy(error)
    said.args = (f"{error.args[0]}; the engine {state}",)
    return said
