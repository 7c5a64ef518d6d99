"""A commit within vLLM's engine process, between two of its steps.

vLLM answers utility calls of its own: pause, `collective_rpc`, resume. Each costs a way there and
back while no token is made. The plugin (`plugin.py`) gives its `EngineCore` one call for all three.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from instep.engine import UNLABELLED
from instep.engine.fused_commit import accepted, beside, goes_on, proved_together, refused, unchanged
from instep.engine.vllm.config import reaches_workers
from instep.protocol import Identity, Reply, Request, decode, encode


def commit(core: Any, payload: bytes, reset: bool, version: str) -> list[bytes] | Future[list[bytes]]:
    """Does what `fused_commit.FusedCommit` says. core: an `EngineCore`. Returns a future if a
    step has to finish first, as vLLM's own pause does.

    vLLM's loop waits for a message when that step has ended, and does not look whether there is
    work again by then: it gets one.
    """
    answers: list[bytes] = core.collective_rpc("instep_call", args=("reserve", beside(payload, version)))
    if refused(answers):
        return answers
    paused = core.pause_scheduler("keep", reset)
    if paused is None:
        return _commit(core, payload, version)
    from vllm.v1.engine import EngineCoreRequestType

    done: Future[list[bytes]] = Future()

    def then(paused: Future[Any]) -> None:
        try:
            paused.result()
            done.set_result(_commit(core, payload, version))
        except Exception as error:
            done.set_exception(error)
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    paused.add_done_callback(then)
    return done


def relabel(core: Any) -> None:
    """Removes a version's label from weights that are not that version's any more.

    core: an `EngineCore` whose workers were called for something else than a push.
    """
    if not hasattr(core, "set_weight_version") or not reaches_workers(core.vllm_config):  # vLLM 0.27 and later
        return
    answers = core.model_executor.collective_rpc("instep_call", args=("status", encode(Request(0, ""))))
    withdrawn = [decode(decode(answer, Reply).body, Identity).withdrawn for answer in answers]
    if any(one is not None and one.version == core.get_weight_version() for one in withdrawn):
        core.set_weight_version(UNLABELLED)


def _commit(core: Any, payload: bytes, version: str) -> list[bytes]:
    answers: list[bytes] = core.collective_rpc("instep_call", args=("commit", payload))
    if proved_together(answers):
        answers = accepted(answers, core.collective_rpc("instep_call", args=("accept", beside(payload, version))))
    if goes_on(answers):
        if hasattr(core, "set_weight_version"):  # vLLM 0.27 and later
            core.set_weight_version(version)
        core.resume_scheduler()
        core.collective_rpc("instep_call", args=("abort", beside(payload)))
    elif unchanged(answers):
        core.resume_scheduler()
    return answers
