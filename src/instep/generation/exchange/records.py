"""Prompts and results with Open Instruct's names and fields, for trainers that use its queues.

`foreign.py` makes ours of them and of ours them. The classes of Open Instruct itself fit in their
places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SamplingConfig:
    """Sampling settings of a prompt. max_tokens: of a whole response."""

    temperature: float = 0.7
    top_p: float = 1.0
    max_tokens: int = 256
    n: int = 1
    stop: list[str] | None = None
    seed: int | None = None
    logprobs: int | None = 1


@dataclass
class PromptRequest:
    """A prompt. prompt: token ids. generation_config: a `SamplingConfig`, or vLLM's
    `SamplingParams`; None for the defaults.

    index: the row of the dataset. active_tools: names of the tools that it may call; None means
    all.
    """

    prompt: list[int]
    generation_config: Any
    index: int | None = None
    prompt_id: str | None = None
    is_eval: bool = False
    active_tools: list[str] | None = None


@dataclass
class ToolCallStats:
    """One tool call. runtime: seconds."""

    tool_name: str
    success: bool
    runtime: float


@dataclass
class RequestInfo:
    """What samples did with tools, one entry for each sample. excess_tool_calls: for each tool,
    the calls over the limit."""

    num_calls: list[int] = field(default_factory=list)
    timeouts: list[int] = field(default_factory=list)
    tool_errors: list[str] = field(default_factory=list)
    tool_outputs: list[str] = field(default_factory=list)
    tool_runtimes: list[float] = field(default_factory=list)
    tool_calleds: list[bool] = field(default_factory=list)
    tool_call_stats: list[list[ToolCallStats]] = field(default_factory=list)
    excess_tool_calls: list[dict[str, int]] = field(default_factory=list)


@dataclass
class TokenStatistics:
    """Token counts of one result. generation_time: seconds."""

    num_prompt_tokens: int
    num_response_tokens: int
    generation_time: float
    earliest_start_time: float | None = None


@dataclass
class GenerationResult:
    """A prompt's samples, an entry for each in every list.

    error: why a prompt was not answered, or what went wrong with a sample. versions: by sample,
    spans `(version, start, end)` over its tokens. request: the prompt as an actor understood it,
    None where it did not.
    """

    responses: list[list[int]]
    finish_reasons: list[str]
    masks: list[list[int]]
    request_info: RequestInfo
    index: int | None
    prompt_id: str | None
    token_statistics: TokenStatistics | None = None
    start_time: float | None = None
    logprobs: list[list[float]] | None = None
    reward_scores: list[float] | None = None
    reward_metrics: dict[str, Any] | None = None
    error: str | None = None
    versions: list[list[tuple[str, int, int]]] | None = None
    request: Any = None


class ShutdownSentinel:
    """Marks the end of a queue: nothing more comes."""
