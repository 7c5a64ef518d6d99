"""Notes which version of the weights has made each token of vLLM's answers over HTTP.

vLLM's engine process labels what each step has sampled with the version of that step. The label
changes within a pause, after the proof, so it is the version of the weights that sampled. vLLM's
front end keeps it for each request and tells it when the request has ended, in
`CompletionOutput.weight_versions`. A stream's headers are needed before.
"""

from __future__ import annotations

from typing import Any

from instep.engine.remote.answers import Answer, answer


def note_versions(llm: Any) -> bool:
    """Notes versions from now on in the answers of an `AsyncLLM`. Returns whether this vLLM
    tells them: 0.32 does, 0.31 does not."""
    processor = getattr(llm, "output_processor", None)
    if processor is None or not _labels():
        return False
    add = processor.add_request

    def add_request(request: Any, *arguments: Any, **named: Any) -> Any:
        added = add(request, *arguments, **named)
        if (made := answer.get()) is not None:
            _note(processor, request.request_id, made)
        return added

    processor.add_request = add_request
    return True


def _labels() -> bool:
    from vllm.v1.engine.output_processor import RequestState

    return hasattr(RequestState, "track_weight_version")


def _note(processor: Any, number: str, made: Answer) -> None:
    state = processor.request_states.get(number)
    if state is None or "track_weight_version" in vars(state):  # the second part of a request that comes in parts
        return
    track = state.track_weight_version

    def noted(version: str) -> None:
        track(version)
        made.note(version)

    state.track_weight_version = noted
    made.running.append(lambda: processor.request_states.get(number) is state)
