"""Records of a rollout: requests, an engine's answers, and samples.

A sample is one record; nothing is kept in lists that must stay parallel across samples. Within a
sample `token_ids`, `logprobs` and `mask` have one entry for each token of the response. All records
are msgspec structs: they pickle, and `msgspec.json.encode` writes them.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any, Literal

from msgspec import Struct, ValidationError, convert, field, structs

from instep.errors import ConfigError
from instep.generation.sampling import Sampling
from instep.generation.text import clean

Split = Literal["train", "eval"]
SAMPLES = 1 << 16
"""The largest number of samples of one prompt."""

FinishReason = Literal["stop", "length", "tool_limit", "done", "abort", "error", "repetition"]
"""Why a sample ended.

stop: the model ended it (end token, stop token or stop string). length: a budget did, of the
response, of the context or of a turn.
tool_limit: the model called tools after it was told that it has no calls left. done: an environment
said so. abort: it was aborted or took too long. error, repetition: the engine's own words.
"""

Outcome = Literal["ok", "error", "timeout", "excess", "unknown", "malformed", "abort"]
"""What became of a tool call.

excess: over the limit, not executed. unknown: this sample has no such tool. malformed: its
arguments cannot be read. abort: the sample was.
"""


class PromptId(Struct, frozen=True, order=True):
    """One prompt of one round. `round` separates the same prompt of different epochs, or of
    evaluations at different steps."""

    split: Split
    round: int
    prompt: str

    def __str__(self) -> str:
        return f"{self.split}/{self.round}/{self.prompt}"


class RequestId(Struct, frozen=True, order=True):
    """One sample of a prompt. Its text is for engines and logs; nobody parses it."""

    prompt: PromptId
    sample: int

    def __str__(self) -> str:
        return f"{self.prompt}/{self.sample}"


class Label(Struct, frozen=True):
    """The label that a prompt's answers are verified against: the name of a verifier in
    `RewardConfig.verifiers`, and the value that the verifier takes."""

    verifier: str
    value: Any
    weight: float = 1.0


class PromptRequest(Struct, frozen=True, kw_only=True):
    """A prompt with everything that belongs to it. The result holds the whole request, so that
    nothing is looked up by a position.

    prompt_token_ids: the prompt as the trainer sees it, special tokens included.
    tools: names of the tools that its samples may call; None means all, () none.
    tool_config: by a tool's name, what its `session` is opened with.
    index, metadata: the caller's own, handed back untouched.
    """

    id: PromptId
    prompt_token_ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[str, ...] | None = None
    tool_config: dict[str, dict[str, Any]] = {}
    labels: tuple[Label, ...] = ()
    index: int | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ConfigError(f"prompt {self.id} has no tokens")


class VersionSpan(Struct, frozen=True):
    """Tokens `[start, end)` were sampled with the weights labelled `version`."""

    version: str
    start: int
    end: int


class Completion(Struct, frozen=True, kw_only=True):
    """An engine's answer to one turn.

    token_ids: what was sampled, end and stop tokens included.
    logprobs: of these tokens, natural logarithm, after temperature and whatever else shaped the
    distribution that was sampled from.
    finish_reason: the engine's: stop, length, abort, error or repetition. An aborted turn holds the
    tokens that there were.
    versions: a partition of `[0, len(token_ids))`. An engine that does not report spans has one,
        labelled with the version that it served when it took the request: an old token is then
        never called fresh.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort", "error", "repetition"]
    stop_reason: int | str | None = None
    versions: list[VersionSpan]


class ToolCall(Struct, frozen=True):
    """A call that a parser found. `error` says why it has no arguments; the model is shown the
    error."""

    name: str
    arguments: dict[str, Any] = {}
    error: str | None = None


class ToolRecord(Struct, frozen=True, kw_only=True):
    """A tool call and its result. `turn` counts the model's turns from 0; `seconds` is the time
    that the tool took."""

    tool: str
    turn: int
    outcome: Outcome
    arguments: dict[str, Any] = {}
    output: str = ""
    error: str | None = None
    seconds: float = 0.0
    role: str = "tool"
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = {}

    @property
    def observation(self) -> str:
        """The text that the model is shown: the output, and the error if there was one."""
        return "\n".join(part for part in (self.output, f"Error: {self.error}" if self.error else "") if part)


class RewardPart(Struct, frozen=True):
    """One verifier's score of a sample. `value` is 0 if `error` says that the verifier broke."""

    name: str
    value: float
    weight: float = 1.0
    error: str | None = None


class Reward(Struct, frozen=True):
    """A sample's score and the parts that it was made of. With an `error` the score is
    `RewardConfig.error_score`."""

    score: float
    parts: list[RewardPart] = []
    error: str | None = None


class Sample(Struct, frozen=True, kw_only=True):
    """One rollout.

    token_ids: the response, the model's tokens and the tools' as the model saw them.
    logprobs: of the model's tokens as in `Completion`; 0.0 for the tools'.
    mask: 1 for the model's tokens, 0 for the tools'.
    versions: spans over the model's tokens, which they partition.
    turns: how often the engine was asked. cut: tokens of tool output that did not fit into a
    budget.
    error: what the reader should know of a sample that could not run as asked.
    """

    id: RequestId
    token_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    versions: list[VersionSpan]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    tools: list[ToolRecord] = []
    turns: int = 0
    cut: int = 0
    seconds: float = 0.0
    error: str | None = None
    reward: Reward | None = None


class GenerationResult(Struct, frozen=True, kw_only=True):
    """A request and its samples, `request.sampling.n` of them, in order."""

    request: PromptRequest
    samples: list[Sample]


def checked(request: PromptRequest) -> PromptRequest:
    """Returns the request, its token ids as a list of Python integers. Raises `ConfigError` that
    names a field of a wrong type."""
    name = clean(str(request.id))
    try:
        if set(map(type, request.prompt_token_ids)) != {int}:
            request = structs.replace(request, prompt_token_ids=[index(token) for token in request.prompt_token_ids])
    except TypeError as error:
        raise ConfigError(f"prompt {name}: prompt_token_ids is a list of token ids: {error}") from error
    if isinstance(request.tools, str):
        raise ConfigError(f"prompt {name}: tools is a tuple of names, not one name")
    parts: list[tuple[str, Any, type[Struct]]] = [("", request, PromptRequest), ("id.", request.id, PromptId)]
    parts += [("sampling.", request.sampling, Sampling), *((f"labels[{at}].", label, Label) for at, label in enumerate(request.labels))]
    for prefix, part, kind in parts:
        if wrong := _wrong(part, kind):
            raise ConfigError(f"prompt {name}: {prefix}{wrong}")
    if not min(request.prompt_token_ids) >= 0:
        raise ConfigError(f"prompt {name}: token ids are not negative")
    if request.sampling.n > SAMPLES:
        raise ConfigError(f"prompt {name}: sampling.n is {request.sampling.n}, and {SAMPLES} is the most")
    for label in request.labels:
        if not math.isfinite(label.weight):
            raise ConfigError(f"prompt {name}: the weight of label {label.verifier} is {label.weight}")
    if any(clean(text) != text for text in (request.id.prompt, *request.sampling.stop)):
        raise ConfigError(f"prompt {name}: its name or a stop string holds half of a surrogate pair")
    return request


def _wrong(part: Any, kind: type[Struct]) -> str | None:
    if not isinstance(part, kind):
        return f"is a {type(part).__name__}, not a {kind.__name__}"
    try:
        convert(structs.asdict(part), kind)
    except ValidationError as error:
        message, _, where = str(error).rpartition(" - at `$.")
        return f"{where.rstrip('`')}: {message}"
    return None
