"""Takes prompts, gets them answered and scored, hands results over, on the actor's event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from instep.engine.serving import Serving
from instep.errors import ConfigError, GenerationError
from instep.generation.actor.background import Background
from instep.generation.actor.client import EngineClient
from instep.generation.actor.manager import ActorStatus, ask
from instep.generation.exchange.foreign import ends, give, goes_to, read, refused, sent_as
from instep.generation.exchange.queues import PATIENCE, Places, Port, Queue
from instep.generation.rewards.config import RewardConfig
from instep.generation.rewards.dataset import DatasetRewards
from instep.generation.rollout.turns import Harness, answer
from instep.generation.statistics import lag
from instep.generation.text import clean, told
from instep.generation.types import GenerationResult, PromptId
from instep.generation.waiting import bounded, unless

logger = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between two looks at the engine, and reports to the manager."""
ASKED = 0.1
"""Seconds for which the manager's word holds."""
ANSWER = 30.0
"""Seconds in which the manager must answer."""
ATTEMPTS = 5
"""How often a prompt is answered before pushes are found to come too fast for it."""


@dataclass(frozen=True)
class Settings:
    prompt_queue: Queue | None = None
    results_queue: Queue | None = None
    eval_results_queue: Queue | None = None
    actor_manager: Any = None
    max_staleness: int | None = None
    max_samples: int | None = None
    await_weights: bool = False
    mask_tool_use: bool = True
    observer: Callable[[ActorStatus], None] | None = None


@dataclass
class Prompt:
    """A prompt that is under way. request: the queue's item instead, if that item is refused."""

    request: Any
    task: asyncio.Task[Any]
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class Work:
    """The prompts of one actor, which come by `submitted`, or by the queue when places are free.

    An error of the engine ends the actor, and `astatus` tells it; all others are in their samples.
    A prompt that cannot be answered is the result of its own error.
    """

    def __init__(
        self,
        name: str,
        background: Background,
        serving: Serving,
        client: EngineClient,
        harness: Harness,
        rewards: RewardConfig | DatasetRewards | None,
        settings: Settings,
    ) -> None:
        self.name, self.background, self.serving, self.client, self.harness = name, background, serving, client, harness
        self.rewards, self.settings = rewards, settings
        self.reward = rewards.build(harness.tokenizer) if rewards else None
        self.judging = Background(f"{name}-rewards", lambda: None) if rewards else None
        """The loop that computes rewards: a verifier that blocks it keeps no engine waiting."""
        limit = settings.max_samples or serving.kv_cache.samples
        self.places = Places(limit)
        self.held = Places(2 * limit)
        """Places for samples of queued prompts until hand-over, to bound the results that wait."""
        self.under_way: dict[PromptId, Prompt] = {}
        self.unanswered: list[Any] = []
        self.refusals = 0
        self.history: list[str] = []
        """Versions in the order in which they were pushed."""
        self.answered = self.tokens = self.stale = self.lag = self.errors = 0
        self.stopping = asyncio.Event()
        self.pulling = asyncio.Event()  # set while no prompt is between the queue and `under_way`
        self.pulling.set()
        self.asked, self.paused = -ASKED, False
        # Compared with None: an empty queue of Ray's is false.
        self.inlet = Port(settings.prompt_queue, "prompts") if settings.prompt_queue is not None else None
        self.train = Port(settings.results_queue, "results") if settings.results_queue is not None else None
        self.eval = Port(settings.eval_results_queue, "eval-results") if settings.eval_results_queue is not None else self.train

    def begin(self) -> None:
        self.background.start(self._watch())
        if self.inlet is not None:
            self.background.start(self._pull(self.inlet))

    def serves(self, version: str) -> None:
        self.client.version = version
        if not self.history or self.history[-1] != version:
            self.history.append(version)

    async def submitted(self, item: Any) -> Any:
        """Answers a prompt that came by a call. The result has the form of the prompt's sender."""
        prompt = self._enter(item)
        try:
            return give(await self._answer(prompt))
        except asyncio.CancelledError:
            self.background.check()  # cancelled because the actor failed: say so
            raise
        finally:
            del self.under_way[prompt.request.id]

    async def cancel(self, prompt: PromptId) -> bool:
        found = self.under_way.get(prompt)
        if found is not None:
            found.aborted.set()
        return found is not None

    async def astatus(self) -> ActorStatus:
        failure = self.background.failure
        return ActorStatus(
            name=self.name, version=self.client.version, prompts=len(self.under_way), samples=self.places.used, places=self.places.limit,
            closed=sorted(self.client.gate.closed), answered=self.answered, tokens=self.tokens, stale=self.stale,
            lag=self.lag, errors=self.errors, failure=None if failure is None else f"{type(failure).__name__}: {failure}",
        )  # fmt: skip

    async def drain(self) -> None:
        """Takes no more prompts, and waits until all are answered and handed over."""
        self.stopping.set()
        await self.pulling.wait()
        while going := {prompt.task for prompt in self.under_way.values() if not prompt.task.done()}:
            await asyncio.wait(going)

    async def end(self) -> list[Any]:
        """Cancels what is under way. Returns the prompts without an answer, as they were put."""
        self.failed()
        await self.pulling.wait()
        await asyncio.gather(*(prompt.task for prompt in self.under_way.values()), return_exceptions=True)
        left = [*self.unanswered, *(sent_as(prompt.request) for prompt in self.under_way.values())]
        for port in (self.inlet, self.train, self.eval):
            if port is not None:
                port.close()
        if self.judging is not None:
            await asyncio.to_thread(self.judging.close, PATIENCE)
        return left

    def failed(self) -> None:
        """Cancels the prompts under way, and begins no more."""
        self.stopping.set()
        for prompt in self.under_way.values():
            prompt.task.cancel()

    async def _watch(self) -> None:
        """Looks whether the engine has died, also while nobody asks it anything, and reports to
        the manager."""
        while True:
            try:
                await self.serving.check()
            except Exception as error:
                self.background.fail(error)
            status = await self.astatus()
            if self.settings.observer is not None:
                self.settings.observer(status)
            if hasattr(self.settings.actor_manager, "report"):  # Open Instruct's has none
                await bounded(ask(self.settings.actor_manager, "report", status), ANSWER)
            await asyncio.sleep(BEAT)

    async def _pull(self, inlet: Port) -> None:
        while not self.stopping.is_set():
            if await self._must_not_take():
                await asyncio.sleep(ASKED)
                continue
            for places in (self.held, self.places):
                if not await unless(self.stopping, places.room()):
                    return
            self.pulling.clear()
            try:
                item = await inlet.get()
                if not ends(item):
                    await self._begin(item)
            finally:
                self.pulling.set()

    async def _begin(self, item: Any) -> None:
        """Begins a prompt. One that was taken while a pause began waits for the end of the
        pause."""
        self.unanswered.append(item)
        while not self.stopping.is_set() and await self._must_not_take():  # noqa: ASYNC110
            await asyncio.sleep(ASKED)  # nobody tells
        if not self.stopping.is_set():
            self.unanswered.pop()
            self.background.start(self._handle(item))
            await asyncio.sleep(0)  # until it has asked for its places

    async def _must_not_take(self) -> bool:
        if self.settings.await_weights and not self.history:
            return True
        if self.settings.actor_manager is not None and time.monotonic() - self.asked >= ASKED:
            self.paused = bool(await bounded(ask(self.settings.actor_manager, "should_stop"), ANSWER))
            self.asked = time.monotonic()
        return self.paused

    async def _handle(self, item: Any) -> None:
        """Answers an item that came by the queue."""
        try:
            prompt = self._enter(item)
        except Exception as error:
            return await self._refuse(item, error)
        request = prompt.request
        async with self.held.taken(request.sampling.n):
            port = self._port(request)
            try:
                while not await port.put(give(result := await self._answer(prompt)), lambda: self._too_old(result, prompt)):
                    self.stale += 1  # while it waited for a queue that was full
            except Exception as error:  # of the prompt, or a result that the queue does not take
                if self.background.failure is not None:
                    raise
                del self.under_way[request.id]
                return await self._refuse(sent_as(request), error)
        del self.under_way[request.id]
        return None

    async def _refuse(self, item: Any, error: Exception) -> None:
        """Puts a result that says why this item cannot be answered."""
        logger.warning("%s: a prompt is refused: %s", self.name, told(error))
        self.refusals += 1
        self.errors += 1
        place = PromptId("train", -self.refusals, "refused")
        self.under_way[place] = Prompt(item, _this_task())
        why = clean(str(error)) or type(error).__name__
        await self._port(item).put(refused(item, why, rewarded=self.rewards is not None), lambda: False)
        self.under_way.pop(place)

    def _port(self, item: Any) -> Port:
        port = self.train if goes_to(item) == "train" else self.eval
        assert port is not None
        return port

    async def _answer(self, prompt: Prompt) -> GenerationResult:
        request = prompt.request
        try:
            for _ in range(ATTEMPTS):
                async with self.places.taken(request.sampling.n):
                    result = await answer(request, self.client, self.harness, prompt.aborted)
                self.tokens += sum(sum(sample.mask) for sample in result.samples)
                if not self._too_old(result, prompt):
                    break
                self.stale += 1
            else:
                raise GenerationError(
                    f"prompt {request.id} was too old {ATTEMPTS} times: pushes come faster than it is answered",
                    next_step="raise max_staleness, push less often, or bound responses",
                )
        except Exception as error:
            if not isinstance(error, ConfigError):  # else the engine does not take such a prompt, and takes others
                self.background.fail(error)
            raise
        if self.reward is not None and self.judging is not None:
            result = await self.judging.aside(self.reward(result))
        if not self.settings.mask_tool_use:
            samples = [structs.replace(sample, mask=[1] * len(sample.token_ids)) for sample in result.samples]
            result = structs.replace(result, samples=samples)
        self.answered += 1
        self.errors += sum(bool(sample.error or (sample.reward and sample.reward.error)) for sample in result.samples)
        return result

    def _too_old(self, result: GenerationResult, prompt: Prompt) -> bool:
        self.lag = max(lag(sample, self.history) for sample in result.samples)
        bound = self.settings.max_staleness
        return bound is not None and self.lag > bound and not prompt.aborted.is_set()

    def _enter(self, item: Any) -> Prompt:
        """Notes a prompt as under way. Raises `ConfigError` for an item that is no prompt or
        cannot be answered."""
        request = read(item)
        self.harness.check(request)
        if self.rewards is not None:
            self.rewards.check(request)
        if request.id in self.under_way:
            raise ConfigError(f"prompt {request.id} is under way already: a round of its own tells it from the same prompt at another time")
        prompt = self.under_way[request.id] = Prompt(request, _this_task())
        return prompt


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
