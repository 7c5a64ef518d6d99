"""Converts Open Instruct's prompts to ours, and our results to Open Instruct's. All other
modules use the records of `types.py`.

A prompt is known by its attributes, whatever its class is called. Who sent one gets results of the
classes that stand in the same module, and of those in `foreign_records.py` where there are none.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from msgspec import structs

from instep.errors import ConfigError
from instep.generation.exchange import records as records
from instep.generation.sampling import Sampling, from_vllm
from instep.generation.types import GenerationResult, PromptId, PromptRequest, RequestId, Reward, Sample, ToolRecord, checked

SENT_AS = "instep.sent_as"
"""Key in a request's metadata of the object that the request was made from."""
METRICS = "instep.reward_metrics"
"""Key in a request's metadata of the metrics that Open Instruct's reward function returns."""
SAMPLING = {"n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"}
ANYWAY = {"logprobs"}
"""Settings whose answer a result always has: the sampled tokens' log-probabilities."""


def ends(item: Any) -> bool:
    """Whether an item of a queue is an end mark and no prompt: None, or a `ShutdownSentinel`."""
    return item is None or type(item).__name__ == records.ShutdownSentinel.__name__


def read(item: Any) -> PromptRequest:
    """Returns the item as a `PromptRequest`. Raises `ConfigError` for an item that is no prompt,
    or that asks for what no actor does."""
    if isinstance(item, PromptRequest):
        return checked(item)
    if missing := [name for name in ("prompt", "generation_config", "prompt_id") if not hasattr(item, name)]:
        raise ConfigError(f"a {type(item).__name__} is no prompt: it has no {', '.join(missing)}", next_step="put a PromptRequest")
    environment = getattr(item, "env_config", None)
    asked = [name for name in ("env_name", "env_class", "env_configs") if getattr(environment, name, None)]
    if asked:
        raise ConfigError(f"prompt {item.prompt_id} asks for an environment ({', '.join(asked)})", next_step="give the actor it as a tool")
    tools = getattr(item, "active_tools", None)
    request = PromptRequest(
        id=PromptId("eval" if getattr(item, "is_eval", False) else "train", 0, str(item.prompt_id)),
        prompt_token_ids=_token_ids(item.prompt),
        sampling=_sampling(item.generation_config),
        tools=None if tools is None else tuple(tools),
        index=getattr(item, "index", None),
        metadata={SENT_AS: item},
    )
    return checked(request)


def give(result: GenerationResult) -> Any:
    """Returns the result in the form of the prompt's sender. For one of our own prompts, it is
    returned unchanged."""
    item, metrics = (result.request.metadata.get(key) for key in (SENT_AS, METRICS))
    return result if item is None else _theirs(item, result.samples, _own(result.request), metrics or {})


def refused(item: Any, why: str, *, rewarded: bool) -> Any:
    """Makes the answer to a prompt that cannot be answered: a result whose samples have the
    finish reason `error`, in the form of its sender."""
    reward = Reward(0.0, [], why) if rewarded else None
    try:
        request = read(item)
    except Exception:  # whatever was in the queue
        if isinstance(item, PromptRequest):
            return GenerationResult(request=item, samples=[_empty(RequestId(item.id, 0), why, reward)])
        return _theirs(item, [_empty(RequestId(PromptId("train", 0, ""), 0), why, reward)], None, {})
    samples = [_empty(RequestId(request.id, index), why, reward) for index in range(request.sampling.n)]
    return give(GenerationResult(request=request, samples=samples))


def _theirs(item: Any, samples: Sequence[Sample], request: PromptRequest | None, metrics: dict[str, Any]) -> Any:
    """Makes the result for the sender of `item`. request: None where the item is no prompt."""
    rewarded = any(sample.reward for sample in samples)
    seconds = max((sample.seconds for sample in samples), default=0.0)
    counts = request and _made(
        item, "TokenStatistics", num_prompt_tokens=len(request.prompt_token_ids),
        num_response_tokens=sum(len(sample.token_ids) for sample in samples), generation_time=seconds,
    )  # fmt: skip
    return _made(
        item, "GenerationResult",
        responses=[sample.token_ids for sample in samples],
        finish_reasons=["stop" if sample.finish_reason == "done" else sample.finish_reason for sample in samples],
        masks=[sample.mask for sample in samples],
        request_info=request_info(samples, item),
        index=getattr(item, "index", None),
        prompt_id=getattr(item, "prompt_id", None),
        token_statistics=counts,
        start_time=time.perf_counter() - seconds,
        logprobs=[sample.logprobs for sample in samples],
        reward_scores=[sample.reward.score if sample.reward else 0.0 for sample in samples] if rewarded else None,
        reward_metrics=metrics if rewarded else None,
        error="; ".join(sample.error for sample in samples if sample.error) or None,
        versions=[[(span.version, span.start, span.end) for span in sample.versions] for sample in samples],
        request=request,
    )  # fmt: skip


def goes_to(item: Any) -> str:
    """Returns the split of an item, whatever the item is."""
    if isinstance(item, PromptRequest):
        return "eval" if getattr(item.id, "split", None) == "eval" else "train"
    return "eval" if getattr(item, "is_eval", False) is True else "train"


def sent_as(request: Any) -> Any:
    """Returns the object that was put into the queue."""
    return request.metadata.get(SENT_AS, request) if isinstance(request, PromptRequest) else request


def request_info(samples: Sequence[Sample], item: Any = None) -> Any:
    """Returns what samples did with tools, in the form of the sender of `item`."""
    ran = [[record for record in sample.tools if record.outcome not in ("excess", "unknown", "malformed")] for sample in samples]
    excess = [[record for record in sample.tools if record.outcome == "excess"] for sample in samples]
    return _made(
        item, "RequestInfo",
        num_calls=[len(sample.tools) for sample in samples],
        timeouts=[int(any(map(_late, sample.tools))) for sample in samples],
        tool_errors=["".join(_error(record) for record in sample.tools) for sample in samples],
        tool_outputs=["".join(record.output for record in sample.tools) for sample in samples],
        tool_runtimes=[sum(record.seconds for record in sample.tools) for sample in samples],
        tool_calleds=[any(record.info.get("called", True) for record in records) for records in ran],
        tool_call_stats=[
            [
                _made(item, "ToolCallStats", tool_name=one.tool, success=not _error(one) and not _late(one), runtime=one.seconds)
                for one in records
            ]
            for records in ran
        ],
        excess_tool_calls=[dict(Counter(record.tool for record in records)) for records in excess],
    )  # fmt: skip


def _late(record: ToolRecord) -> bool:
    return record.outcome == "timeout" or bool(record.info.get("timeout"))


def _error(record: ToolRecord) -> str:
    return record.error or str(record.info.get("error") or "")


def _empty(id: RequestId, why: str, reward: Reward | None = None) -> Sample:
    return Sample(id=id, token_ids=[], logprobs=[], mask=[], versions=[], finish_reason="error", error=why, reward=reward)


def _own(request: PromptRequest) -> PromptRequest:
    """Returns the request without what this module has put into its metadata."""
    metadata = {key: value for key, value in request.metadata.items() if key not in (SENT_AS, METRICS)}
    return structs.replace(request, metadata=metadata)


def _made(item: Any, name: str, **values: Any) -> Any:
    """Makes a record of that name, of the class that the sender of `item` uses. Values for which
    the class has no field become attributes."""
    kind = getattr(sys.modules.get(type(item).__module__), name, None)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        kind = getattr(records, name)
    known = {one.name for one in fields(kind) if one.init}
    try:
        made = kind(**{key: value for key, value in values.items() if key in known})
    except TypeError:  # a later release's, which wants what is not known here
        made, known = getattr(records, name)(**values), set(values)
    for key in values.keys() - known:
        setattr(made, key, values[key])
    return made


def _token_ids(prompt: Any) -> list[int]:
    try:
        return [int(token) for token in prompt]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a prompt is a list of token ids, not {type(prompt).__name__}: {error}") from error


def _sampling(config: Any) -> Sampling:
    if config is None:
        config = records.SamplingConfig()
    if isinstance(config, Sampling):
        return config
    if hasattr(config, "__struct_fields__"):
        return from_vllm(config)
    if not is_dataclass(config) and not hasattr(config, "__dict__"):
        raise ConfigError(f"generation_config is a {type(config).__name__}: give it a SamplingConfig or vLLM's SamplingParams")
    names = [one.name for one in fields(config)] if is_dataclass(config) else list(vars(config))
    given = {name: value for name in names if (value := getattr(config, name)) is not None}
    if strange := sorted(given.keys() - SAMPLING - ANYWAY):
        raise ConfigError(f"generation_config asks for {', '.join(strange)}, which no rollout has")
    stop = given.get("stop", ())
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
    return Sampling(**{name: value for name, value in given.items() if name in SAMPLING})
