"""The turn loop: a prompt becomes samples, in turns of the model and of its tools.

Token ids are the truth. What the engine sampled is appended as it is, and never tokenised again;
text is decoded from it, to look for tool calls. Tool output is tokenised once and marked with the
mask.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from instep.errors import ConfigError, GenerationError
from instep.generation.overtime import in_time
from instep.generation.rollout.budget import Limits, room, shorten, truncate, turn_tokens
from instep.generation.rollout.transcript import Transcript, check
from instep.generation.sampling import Sampling
from instep.generation.text import Tokenizer, clean, told
from instep.generation.tools.parsers import ToolParser, readable
from instep.generation.tools.toolset import ToolDefinition, ToolSet
from instep.generation.types import (
    Completion,
    FinishReason,
    GenerationResult,
    Outcome,
    PromptRequest,
    RequestId,
    Sample,
    ToolCall,
    ToolRecord,
)
from instep.generation.waiting import Interrupt, abandon, contained, is_for_us

logger = logging.getLogger(__name__)

SHORT = 1000
"""Characters of a turn that any parser reads in no time. With some of vLLM's, time grows with the
square of the length."""
READING = 5.0
"""Seconds in which the calls of a longer turn must be found."""
GRACE = 10.0
"""Seconds in which an engine must hand over what an aborted turn has sampled."""


class Client(Protocol):
    """The engine's interface to a rollout.

    Whatever keeps a rollout waiting belongs in here: a weight update that drains the engine holds
    back the next `complete`, and need not wait for a sample whose tool is at work.
    """

    async def complete(self, prompt_token_ids: Sequence[int], sampling: Sampling, id: RequestId, turn: int) -> Completion:
        """Samples one turn. An error raised here ends all samples of the prompt. Cancelling the
        call stops the engine's work on it.

        `id` and `turn` name the request. `id.prompt` is what samples of one prompt have in common,
        should a cache need a salt.
        """

    async def abort(self, id: RequestId) -> None:
        """Makes a `complete` that is under way answer with the tokens that it has, finish reason
        `abort`."""


@dataclass(frozen=True)
class Harness:
    """Settings that all rollouts of one actor share. Without a parser no tool is called."""

    tokenizer: Tokenizer
    limits: Limits
    tools: ToolSet = field(default_factory=ToolSet)
    parser: ToolParser | None = None

    def __post_init__(self) -> None:
        if len(self.tools) and self.parser is None:
            raise ConfigError("there are tools, but no parser that finds the calls to them")

    def check(self, request: PromptRequest) -> None:
        """Raises `ConfigError` for a request that asks for a tool that is not there."""
        self.tools.select(request.tools)


async def answer(request: PromptRequest, client: Client, harness: Harness, aborted: asyncio.Event | None = None) -> GenerationResult:
    """Returns all samples of a prompt, which run side by side. If one fails, the others are
    cancelled and its error is raised."""
    harness.check(request)
    tasks = [asyncio.ensure_future(rollout(request, sample, client, harness, aborted)) for sample in range(request.sampling.n)]
    try:
        return GenerationResult(request=request, samples=list(await asyncio.gather(*tasks)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # sessions are closed before the prompt is given back


async def rollout(request: PromptRequest, sample: int, client: Client, harness: Harness, aborted: asyncio.Event | None = None) -> Sample:
    """Returns one sample of a prompt.

    aborted: when set, the sample ends soon with what it has, finish reason `abort`. Cancelling the
    task ends it with nothing. Raises what the client raises, and `GenerationError` for an answer
    that cannot be trained on: nothing else. What tools raise is told to the model. Whatever else
    goes wrong ends this sample, with the tokens that it has, the finish reason `error` and the
    reason.
    """
    started = time.perf_counter()
    id = RequestId(request.id, sample)
    turns = _Turns(request, id, client, harness, Interrupt(aborted, harness.limits.sample_timeout))
    finish: FinishReason = "error"
    try:
        finish = await turns.run_with_tools()
    except BaseException as error:
        if error is turns.of_client or is_for_us(error):
            raise
        turns.error = f"{turns.doing}: {told(error)}"
        logger.warning("sample %s ended: %s", id, turns.error)
    return turns.sample(finish, time.perf_counter() - started)


class _Turns:
    """A sample while it grows."""

    def __init__(self, request: PromptRequest, id: RequestId, client: Client, harness: Harness, interrupt: Interrupt) -> None:
        self.request, self.id, self.client, self.harness, self.interrupt = request, id, client, harness, interrupt
        self.transcript = Transcript()
        self.records: list[ToolRecord] = []
        self.turn = 0
        self.cut = 0
        self.calls = 0
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.doing = "the prompt could not be read"
        """What went wrong if anything does now."""
        self.of_client: BaseException | None = None

    async def run_with_tools(self) -> FinishReason:
        """Runs the whole sample, in sessions of its environments."""
        self.doing = "an environment did not open"
        within = self.harness.limits.tool_timeout
        opened = self.harness.tools.opened(self.id, names=self.request.tools, config=self.request.tool_config, within=within)
        async with opened as tools:
            return await self.run(tools)

    async def run(self, tools: ToolSet) -> FinishReason:
        definitions = tools.definitions
        parser = self.harness.parser if definitions else None
        stop = parser.stops(definitions) if parser else ()
        if self.room() == 0:
            prompt, context = len(self.request.prompt_token_ids), self.harness.limits.max_model_len
            self.error = f"the prompt has {prompt} tokens, which leave no room in a context of {context}"
            return "length"
        while True:
            budget = turn_tokens(self.harness.limits, self.room())
            completion = await self.complete(budget, stop)
            if completion is None:
                return "abort"
            self.turn += 1
            self.transcript.add_turn(completion)
            self.stop_reason = completion.stop_reason
            ended = completion.finish_reason
            if parser is None or ended not in ("stop", "length") or not completion.token_ids or self.room() == 0:
                return ended
            calls = await self.read(parser, completion, definitions)
            if not calls:
                return ended
            told = self.calls > self.harness.limits.max_tool_calls
            records = [await self.call(tools, call) for call in calls]
            self.records += records
            if told:
                return "tool_limit"
            if any(record.outcome == "abort" for record in records):
                return "abort"
            if any(record.done for record in records):
                return "done"
            if not self.observe(parser, records):
                return "length"

    async def read(self, parser: ToolParser, completion: Completion, definitions: list[ToolDefinition]) -> list[ToolCall]:
        """Returns the calls of a turn. If the parser raises or takes too long, the turn has one
        call with an error."""
        self.doing = "what the model said could not be read"
        text = self.harness.tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        try:
            if len(text) <= SHORT:
                calls = parser.parse(text, definitions)
            else:
                calls = await in_time(lambda: parser.parse(text, definitions), READING)
        except TimeoutError:
            calls = [ToolCall("", error=f"the tool call could not be read in {READING:g} seconds")]
        except Exception as error:
            calls = [ToolCall("", error=f"the tool call could not be read: {told(error)}")]
        return [readable(call) for call in calls]

    async def complete(self, budget: int, stop: tuple[str, ...]) -> Completion | None:
        """Returns the model's next turn, checked; None if it was aborted before the engine had
        anything to hand over."""
        self.doing = "the engine could not be asked"
        if self.interrupt.is_set():
            self._abort()
            return None
        generated = self.transcript.generated
        sampling = self.request.sampling.of_turn(self.id.sample, self.turn, max_tokens=budget, generated=generated, stop=stop)
        prompt = [*self.request.prompt_token_ids, *self.transcript.token_ids]
        task = asyncio.ensure_future(contained(self.client.complete(prompt, sampling, self.id, self.turn)))
        try:
            if not await self.interrupt.before(task):
                self._abort()
                aborting = asyncio.ensure_future(self.client.abort(self.id))
                await asyncio.wait({task, aborting}, timeout=GRACE)
                abandon(aborting)
                if not task.done():
                    self.error = f"the engine did not hand over an aborted turn in {GRACE:g} seconds"
                    return None
            if task.cancelled():  # which must not look as if this rollout was
                raise GenerationError(f"sample {self.id}, turn {self.turn}: the client cancelled its own call")
            completion = task.result()
            check(completion, budget, self.id, self.turn)
            return completion
        except BaseException as error:
            self.of_client = error
            raise
        finally:
            abandon(task)

    async def call(self, tools: ToolSet, call: ToolCall) -> ToolRecord:
        self.doing = "a tool could not be called"
        self.calls += 1
        limits = self.harness.limits
        if self.calls > limits.max_tool_calls:
            return self._not_run(call, "excess", f"no tool calls are left: {limits.max_tool_calls} were allowed")
        if self.interrupt.is_set():
            self._abort()
            return self._not_run(call, "abort", "the sample was aborted")
        task = asyncio.ensure_future(tools.call(call, within=limits.tool_timeout, turn=self.turn - 1))
        try:
            if await self.interrupt.before(task):
                record = task.result()
                error = record.error and self._shorten(record.error)
                return structs.replace(record, output=self._shorten(record.output), error=error)
        finally:
            abandon(task)
        self._abort()
        return self._not_run(call, "abort", "the sample was aborted")

    def observe(self, parser: ToolParser, records: Sequence[ToolRecord]) -> bool:
        """Shows the model what its tools answered. Returns False if no room is left for the
        model to go on."""
        self.doing = "what its tools answered could not be shown to the model"
        token_ids = parser.observe(records, self.transcript.token_ids[-1])
        kept, cut = truncate(token_ids, self.room())
        self.transcript.add_tool_output(kept)
        self.cut += cut
        return self.room() > 0

    def room(self) -> int:
        sampling, prompt = self.request.sampling, len(self.request.prompt_token_ids)
        return room(self.harness.limits, sampling.max_tokens, prompt, len(self.transcript))

    def sample(self, finish: FinishReason, seconds: float) -> Sample:
        grown = self.transcript
        return Sample(
            id=self.id, token_ids=grown.token_ids, logprobs=grown.logprobs, mask=grown.mask, versions=grown.versions,
            finish_reason=finish, stop_reason=self.stop_reason, tools=self.records, turns=self.turn, cut=self.cut,
            seconds=seconds, error=self.error and clean(self.error),
        )  # fmt: skip

    def _shorten(self, text: str) -> str:
        limits, tokenizer = self.harness.limits, self.harness.tokenizer
        text = shorten(text, limits.max_tool_output_chars)
        if limits.max_tool_output_tokens is None:
            return text
        kept, cut = truncate(tokenizer.encode(text, add_special_tokens=False), limits.max_tool_output_tokens)
        return f"{tokenizer.decode(kept, skip_special_tokens=False)}\n... ({cut} more tokens left out)" if cut else text

    def _not_run(self, call: ToolCall, outcome: Outcome, error: str) -> ToolRecord:
        return ToolRecord(tool=call.name, turn=self.turn - 1, outcome=outcome, arguments=call.arguments, error=error)

    def _abort(self) -> None:
        if not self.interrupt.aborted.is_set():
            self.error = f"the sample took longer than {self.harness.limits.sample_timeout:g} seconds"
