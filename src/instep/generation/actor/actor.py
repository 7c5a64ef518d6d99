"""An engine that answers prompts with samples, and follows a trainer. Ray is not needed; `ray.py`
puts it into a Ray actor.

    actor = LLMActor(partial(start_vllm, "model"), reward_config=rewards, prompt_queue=prompts, results_queue=results)
    sync = WeightSync(model, engines=[actor])
    sync.push("step-1")                      # while it generates
    result = results.get()
    actor.check_background_threads()         # raises what went wrong in the background
    actor.stop()

Everything happens on one event loop in a thread of its own: the engine, the rollouts, their
rewards. Queues are waited for in threads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from instep.engine.serving import KVCacheInfo, ModelDims, Serving
from instep.errors import ConfigError, EngineTimeout
from instep.generation.actor.background import Background
from instep.generation.actor.client import EngineClient
from instep.generation.actor.follower import CONTROL, Follower, Update
from instep.generation.actor.manager import ActorStatus
from instep.generation.actor.work import Settings, Work
from instep.generation.exchange.queues import Queue
from instep.generation.rewards.config import RewardConfig
from instep.generation.rewards.dataset import DatasetRewards
from instep.generation.rollout.budget import Limits
from instep.generation.rollout.turns import Harness
from instep.generation.text import Tokenizer
from instep.generation.tools.parsers import ToolParser
from instep.generation.tools.toolset import ToolSet
from instep.generation.types import PromptId

T = TypeVar("T")


class LLMActor(Follower):
    """Answers prompts with an engine of its own, while a trainer pushes to it. Stands in `engines`
    as it is.

    start: makes the engine, on the actor's event loop. tokenizer: the engine's own if None.
    tool_parser: makes the parser of tool calls, given the tokenizer.
    prompt_queue: of `PromptRequest`, or of Open Instruct's, whose results are of its
        `GenerationResult` then; without one, prompts come by `submit` alone. A prompt that cannot
        be answered has a result whose samples have the finish reason `error`.
    results_queue, eval_results_queue: of `GenerationResult`, by the split of the prompt. While one
        is full no prompt is taken, once as many samples wait for it as the engine has places.
    actor_manager: an `ActorManager`, or another object or handle with `should_stop`: while it says
    so no prompt is taken.
    max_tool_calls: of one sample, where no limits are given. mask_tool_use: whether a sample's mask
    is 0 for tools' tokens.
    inflight_updates: generation goes on across an update, and every token is labelled with the
        weights that it came from. If False, an update first waits until the engine has ended the
        turns that it is working on, no longer than `drain_timeout` seconds.
    max_staleness: a result with tokens more versions behind than this is made again, with the
        weights of that time. Looked at when its samples have ended, and again while it waits for a
        full results_queue; what is in the queue is the trainer's.
    max_samples: samples at a time; if None as many as the KV cache holds, see
    `KVCacheInfo.samples`.
    await_weights: takes no prompt from the queue before a trainer has pushed a version. For an
    actor that takes a dead one's place.
    observer: called each second with the actor's `ActorStatus`, on its event loop.
    http: answer OpenAI's interface at `url`, on a port of this host alone. Chats of a tokenizer
        without a template are their contents, one after the other.

    Raises what `start` raises, and `EngineTimeout` where that takes longer than `start_timeout`
    seconds.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[Serving]],
        *,
        name: str = "actor",
        tokenizer: Tokenizer | None = None,
        limits: Limits | None = None,
        tools: Sequence[Any] = (),
        tool_parser: Callable[[Tokenizer], ToolParser] | None = None,
        max_tool_calls: int | None = None,
        mask_tool_use: bool = True,
        reward_config: RewardConfig | DatasetRewards | None = None,
        prompt_queue: Queue | None = None,
        results_queue: Queue | None = None,
        eval_results_queue: Queue | None = None,
        actor_manager: Any = None,
        inflight_updates: bool = True,
        drain_timeout: float = 50.0,
        max_staleness: int | None = None,
        max_samples: int | None = None,
        await_weights: bool = False,
        observer: Callable[[ActorStatus], None] | None = None,
        http: bool = False,
        start_timeout: float = 1200.0,
    ) -> None:
        check_queues(prompt_queue, results_queue, eval_results_queue, actor_manager)
        if limits is not None and max_tool_calls is not None:
            raise ConfigError("max_tool_calls and limits are both given: limits.max_tool_calls is the same")
        if (max_staleness is not None and max_staleness < 0) or (max_samples is not None and max_samples < 1):
            raise ConfigError("max_staleness must not be negative, max_samples must be at least 1")
        self.name = name
        self.inflight_updates = inflight_updates
        self.drain_timeout = drain_timeout
        self.url: str | None = None
        self._serving: Serving | None = None
        self._background, self._turn, self._update = Background(name, self._failed), asyncio.Lock(), Update()
        settings = Settings(
            prompt_queue, results_queue, eval_results_queue, actor_manager,
            max_staleness, max_samples, await_weights, mask_tool_use, observer,
        )  # fmt: skip

        async def begin() -> None:
            toolset = await ToolSet.connect(tools)  # before the engine: a wrong tool is told at once
            serving = self._serving = await start()
            allowed = limits or Limits(max_model_len=serving.kv_cache.max_model_len, **calls)
            harness = _harness(serving, tokenizer, allowed, toolset, tool_parser)
            self._client = EngineClient(serving)
            self._work = Work(self.name, self._background, serving, self._client, harness, reward_config, settings)
            self._work.begin()
            if http:
                sock = socket.create_server(("127.0.0.1", 0))  # listens from here on: nobody else can get its port
                self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
                self._background.start(serving.serve(sock))

        calls = {} if max_tool_calls is None else {"max_tool_calls": max_tool_calls}
        try:
            self._background.run(begin(), start_timeout)
        except BaseException as error:
            self.stop(drain=False)
            if isinstance(error, TimeoutError):
                raise EngineTimeout(f"{name} did not start within {start_timeout:g} s") from None
            raise

    # Prompts

    def submit(self, request: Any) -> Future[Any]:
        """Answers a prompt past the queues. A `PromptRequest` gives a `GenerationResult`, each
        either Open Instruct's or ours. Cancelling the future drops the prompt's samples.

        Raises `GenerationError` where the actor has failed or is closed. The future raises
        `ConfigError` for a prompt that asks for a tool or a verifier that is not there or that the
        engine does not take, and what the engine raised where it cannot go on.
        """
        self._background.check()
        return self._background.submit(self._work.submitted(request))

    async def generate(self, request: Any) -> Any:
        """Does what `submit` does, for asyncio."""
        return await asyncio.wrap_future(self.submit(request))

    def cancel(self, prompt: PromptId) -> bool:
        """Ends a prompt's samples now, with the tokens they have and the finish reason `abort`.
        Returns False if the prompt is not under way."""
        return self._control(self._work.cancel(prompt))

    # What it is, and how it is

    def ready(self) -> bool:
        """Returns True. Raises `GenerationError` if the actor has failed."""
        self._background.check()
        return True

    def check_background_threads(self) -> None:
        """Raises `GenerationError` if anything in the background has failed. The error itself is
        its cause."""
        self._background.check()

    def works(self) -> bool:
        """Whether the actor has neither failed nor been stopped."""
        return self._background.failure is None and not self._background.closed

    def status(self) -> ActorStatus:
        return self._control(self._work.astatus())

    def kv_cache_info(self) -> KVCacheInfo:
        return self._started().kv_cache

    def get_kv_cache_info(self) -> int:
        """Returns how many samples of the longest context fit into the KV cache."""
        return max(1, int(self.kv_cache_info().concurrency))

    def get_model_dims(self) -> ModelDims:
        return self._started().dims

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. Returns whether it is empty now: blocks that running
        requests use stay."""
        return self._control(self._started().reset_prefix_cache())

    # The end

    def stop(self, *, drain: bool = True, timeout: float = 60.0) -> list[Any]:
        """Stops taking prompts, ends those under way, hands over their results, and ends the
        engine. May be repeated.

        drain: let them end by themselves, no longer than `timeout` seconds.
        Returns the prompts that were not answered, for whoever wants to give them to another actor.
        """
        if self._background.closed:
            return []
        left: list[Any] = []
        if hasattr(self, "_work"):
            if drain and self._background.failure is None:
                with suppress(TimeoutError):
                    self._background.run(self._work.drain(), timeout)
            left = self._background.run(self._work.end(), CONTROL)
        if self._serving is not None:
            with suppress(TimeoutError):
                self._background.run(self._serving.aclose(), CONTROL)
        self._background.close(CONTROL)
        return left

    def _failed(self) -> None:
        if hasattr(self, "_work"):
            self._work.failed()

    def _control(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._background.run(coroutine, CONTROL)


def _harness(
    serving: Serving,
    tokenizer: Tokenizer | None,
    limits: Limits,
    tools: ToolSet,
    tool_parser: Callable[[Tokenizer], ToolParser] | None,
) -> Harness:
    context = serving.kv_cache.max_model_len
    if limits.max_model_len > context:
        raise ConfigError(f"limits.max_model_len is {limits.max_model_len}, the engine's context {context} tokens")
    tokenizer = tokenizer or serving.tokenizer
    if tokenizer is None:
        raise ConfigError("the engine has no tokenizer: give one")
    return Harness(tokenizer, limits, tools, tool_parser(tokenizer) if tool_parser else None)


def check_queues(prompt_queue: Any, results_queue: Any, eval_results_queue: Any, actor_manager: Any) -> None:
    """Raises `ConfigError` for an object that is no queue or no manager, and for a prompt queue
    without a results queue."""
    if prompt_queue is not None and results_queue is None:
        raise ConfigError("prompts come by a queue, but there is no results_queue for what is made of them")
    for name, given, method in (
        ("prompt_queue", prompt_queue, "get"), ("results_queue", results_queue, "put"),
        ("eval_results_queue", eval_results_queue, "put"), ("actor_manager", actor_manager, "should_stop"),
    ):  # fmt: skip
        if given is not None and not hasattr(given, method) and not hasattr(given, f"{method}_async"):
            raise ConfigError(f"{name} is a {type(given).__name__}, which has no {method}")
