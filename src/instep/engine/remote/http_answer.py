"""Reads from an engine's answer to a control request which status the server sends."""

from __future__ import annotations

import msgspec

from instep.engine.remote.rpc import LATE_THERE, Outcome
from instep.protocol import Fault, Reply, decode

STATUS = {
    "ConfigError": 400, "PlanError": 422, "VersionConflict": 409, "EngineBusy": 409, "EngineTimeout": 409, "TransportError": 424,
    "EngineDirty": 503, "EngineLost": 503, LATE_THERE: 504,
}  # fmt: skip


def faults_of(answer: bytes) -> list[Fault]:
    """Returns the fault of the engine, or else those of its workers."""
    try:
        outcome = decode(answer, Outcome)
    except msgspec.DecodeError:
        return []
    if outcome.fault is not None:
        return [outcome.fault]
    return [reply.fault for reply in _replies(outcome) if reply.fault is not None]


def _replies(outcome: Outcome) -> list[Reply]:
    try:
        return [decode(data, Reply) for data in decode(outcome.body, list[bytes])]
    except msgspec.DecodeError:  # it was no request to the workers
        return []


def status_of(answer: bytes) -> int:
    faults = faults_of(answer)
    return STATUS.get(faults[0].kind, 500) if faults else 200


def dirty_reason(answer: bytes) -> str | None:
    """Why the engine's workers hold parts of two versions; None if they do not."""
    replies = _replies(decode(answer, Outcome))
    if not any(reply.state == "dirty" for reply in replies):
        return None
    return "commit failed: " + next((reply.fault.message for reply in replies if reply.fault is not None), "a worker is dirty")
