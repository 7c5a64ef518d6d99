"""An engine that serves requests in memory: real weights behind it, tokens that a test decides on."""

from __future__ import annotations

import asyncio
import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from helpers.rollouts import TOKENIZER, encode
from instep.engine.memory import MemoryEngine
from instep.engine.serving import KVCacheInfo, ModelDims, Sampled
from instep.errors import EngineDirty, EngineLost
from instep.generation import PromptId, Sampling
from instep.generation.actor.actor import LLMActor
from instep.generation.types import PromptRequest

SOON = 10.0
"""Seconds within which anything must have happened."""

Said = str | Exception | Callable[[list[int]], str]


def wait(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"model.norm.weight": torch.rand(8, generator=generator), "model.embed_tokens.weight": torch.rand(16, 8, generator=generator)}


class FakeServing:
    """Says `says`, a token in a step of `pace` seconds.

    Steps stop while its engine is paused, and at `hold`, after so many tokens, until `go` is set.
    """

    def __init__(self, says: Said = "hi<|end|>", *, hold: int | None = None, places: int = 4, pace: float = 0.0) -> None:
        self.weights = MemoryEngine(weights())
        self.tokenizer = TOKENIZER
        self.kv_cache = KVCacheInfo(tokens=4000 * places, concurrency=places, max_model_len=4000, max_num_seqs=places)
        self.dims = ModelDims(2, 8, 32, 16, 2, 1, 4)
        self.says, self.hold, self.pace = says, hold, pace
        self.asked: list[tuple[str, list[int], dict[str, Any], str | None]] = []
        self.running: dict[str, bool] = {}
        self.ended: list[str] = []
        self.most = 0
        self.dead: Exception | None = None
        self.closed = False
        self.resets = 0
        self.extension: Callable[..., Any] = lambda *_: None

    async def begin(self) -> Any:
        self.go = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        return self

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self.go.set)

    async def generate(self, token_ids: Sequence[int], sampling: dict[str, Any], request_id: str, salt: str | None) -> Sampled:
        if self.weights.refusal:
            raise EngineDirty(self.weights.refusal)
        await self.check()
        self.asked.append((request_id, list(token_ids), sampling, salt))
        assert request_id not in self.running
        self.running[request_id] = True
        self.most = max(self.most, len(self.running))
        try:
            return await self._steps(request_id, encode(self._text(list(token_ids))), sampling["max_tokens"])
        finally:
            del self.running[request_id]
            self.ended.append(request_id)

    def _text(self, token_ids: list[int]) -> str:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says if isinstance(self.says, str) else self.says(token_ids)

    async def _steps(self, request_id: str, tokens: list[int], budget: int) -> Sampled:
        said: list[int] = []
        spans: list[tuple[str, int, int]] = []
        for token in tokens[:budget]:
            while self.weights.paused or (len(said) == self.hold and not self.go.is_set()):
                if not self.running[request_id]:
                    break
                await self.check()
                await asyncio.sleep(0.001)
            if not self.running[request_id]:
                break
            await asyncio.sleep(self.pace)
            version = self.weights.version or "default"
            if not spans or spans[-1][0] != version:
                spans.append((version, len(said), len(said)))
            said.append(token)
            spans[-1] = (version, spans[-1][1], len(said))
        finish: Any = "abort" if not self.running[request_id] else "stop" if len(said) == len(tokens) else "length"
        return Sampled(token_ids=said, logprobs=[-0.5] * len(said), finish_reason=finish, versions=spans)

    async def abort(self, request_id: str) -> None:
        self.running[request_id] = False

    async def collective_rpc(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        return [await asyncio.to_thread(self.extension, method, *arguments)]

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    async def check(self) -> None:
        if self.dead is not None:
            raise EngineLost(f"memory lost a process: {self.dead}")

    async def serve(self, sock: socket.socket) -> None:
        with sock:
            await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.closed = True


class Fleet:
    """Actors that end with the test."""

    def __init__(self) -> None:
        self.prompts: queue.Queue[Any] = queue.Queue()
        self.results: queue.Queue[Any] = queue.Queue()
        self.evals: queue.Queue[Any] = queue.Queue()
        self.actors: list[LLMActor] = []

    def actor(self, serving: FakeServing, **settings: Any) -> LLMActor:
        queues = {"prompt_queue": self.prompts, "results_queue": self.results, "eval_results_queue": self.evals}
        actor = LLMActor(serving.begin, **{**queues, **settings})
        self.actors.append(actor)
        return actor

    def ask(self, name: str, split: Any = "train", **settings: Any) -> PromptRequest:
        sampling = {key: settings.pop(key) for key in list(settings) if key in Sampling.__struct_fields__}
        sampling = {"max_tokens": 1000, **sampling}
        return PromptRequest(id=PromptId(split, 0, name), prompt_token_ids=encode("say"), sampling=Sampling(**sampling), **settings)

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop(drain=False)
